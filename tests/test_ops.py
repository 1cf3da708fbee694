"""Right answers: one test per promise, over the table of cases, on every device."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, CASES, FLOAT, SAMPLES, Args, Case, call, expected
from checks import Guarded, assert_matches, bits, meets_infinity, same_bits, with_leading
from conftest import DEVICES, SIMULATED
from each_op import EACH, ODD, PER_TOKEN, run
from torch_moe_metal import formats
from torch_moe_metal.arguments import ARGUMENTS, format_of, written


def moved(case: Case, device: str) -> Args:
    """The case's arguments on a device, with the strides of the case, including 0."""

    def move(tensor: Tensor) -> Tensor:
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: move(tensor) for name, tensor in case.arguments().items()}


@pytest.mark.cases(CASES)
def test_equals_the_reference(device: str, case: Case, roundings: float = 1):
    args = moved(case, device)
    want = case.expected()
    before = {name: bits(tensor) for name, tensor in args.items()}
    got = run(case, args)
    any_infinity = meets_infinity(case.op, args, case.options, device)
    assert_matches(got, want, case.longest_sum, any_infinity, roundings)
    returned = len(got) - len(written(case.op, args))
    assert all(tensor.is_contiguous() for tensor in got[:returned])
    for name, tensor in args.items():
        if name not in written(case.op):
            assert torch.equal(bits(tensor), before[name]), f"{name} has changed"


@pytest.mark.cases(PER_TOKEN)
def test_leading_dimensions(case: Case, device: str):
    args = case.arguments()
    for leading in [(), (6,), (2, 3), (1, 3, 2), (0,), (2, 0), (0, 3)]:
        shaped = with_leading(case, args, leading)
        got = run(case, shaped, device)
        assert_matches(got, expected(case.op, shaped, case.options), case.longest_sum)
        assert all(tensor.shape[: len(leading)] == leading for tensor in got)


# Each argument has its own offset, so one case covers many alignments.
VIEWS = [("strided", 0), ("padded", 1), ("transposed", 2), ("contiguous", 1)]
VIEWS += [pytest.param("contiguous", offset, marks=pytest.mark.slow) for offset in (0, *range(2, 9))]


def kind_of(case: Case, name: str, kind: str) -> str:
    """The bytes of a packed row are contiguous, its rows are anywhere; those of GGML's blocks are at even bytes."""
    if ARGUMENTS[case.op][name].kind != "weight" or format_of(name, case.options) == "dense":
        return kind
    if has_own_scales(case, name):
        return "contiguous" if kind == "contiguous" else "evenly padded"
    return "padded" if kind in ("strided", "transposed") else kind


def has_own_scales(case: Case, name: str) -> bool:
    row = formats.FORMATS.get(format_of(name, case.options))
    return ARGUMENTS[case.op][name].kind == "weight" and row is not None and row.has_own_scales


@pytest.mark.cases(SAMPLES)
@pytest.mark.parametrize("kind, offset", VIEWS)
def test_views_between_guards(case: Case, device: str, kind: str, offset: int):
    """Any strides and any alignment, different for each argument. The memory around the tensors is neither read nor
    written."""
    args = case.arguments()
    guarded = {
        name: Guarded(
            tensor.to(device),
            kind_of(case, name, kind),
            (offset + number * (offset > 0)) * (2 if has_own_scales(case, name) else 1),
        )
        for number, (name, tensor) in enumerate(args.items())
    }
    got = run(case, {name: guard.view for name, guard in guarded.items()})
    assert_matches(got, case.expected(), case.longest_sum)
    for name, guard in guarded.items():
        guard.assert_untouched(name, written=name in written(case.op))


@pytest.mark.cases(SAMPLES)
def test_expanded_arguments(case: Case, device: str):
    """The values of one token, expert or row, expanded to all of them without a copy."""
    for name, letters in case.shapes.items():
        per_token = letters[0] == "T" and name not in written(case.op)
        if not per_token and ARGUMENTS[case.op][name].kind not in ("weight", "scale", "offset"):
            continue
        args = case.arguments()
        args[name] = args[name][:1].clone().expand(args[name].shape)
        want = expected(case.op, args, case.options)
        on_device = {n: tensor.to(device) for n, tensor in args.items()}
        on_device[name] = args[name][:1].to(device).expand(args[name].shape)
        assert_matches(run(case, on_device), want, case.longest_sum)


@pytest.mark.slow
@pytest.mark.cases(SAMPLES)
def test_same_bits_in_100_runs(case: Case, device: str):
    args = {name: tensor.to(device) for name, tensor in case.arguments().items()}
    first = run(case, args, device)
    for _ in range(99):
        assert all(same_bits(a, b) for a, b in zip(run(case, args, device), first, strict=True))


def gate_of_many_tokens() -> bool:
    """Whether `gate` is correct with so many tokens that it uses oneDNN's products."""
    (case,) = (case for case in CASES if str(case) == "gate-blocks-bf16")
    assert_matches(run(case, case.arguments("cpu")), case.expected(), 70)
    return True


def test_gate_without_onednn():
    with torch.backends.mkldnn.flags(enabled=False):
        assert gate_of_many_tokens()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_gate_with_onednn_without_amx(isa: str):
    """The variable is read once, so this needs a new process."""
    code = "import torch_moe_metal, test_ops; assert test_ops.gate_of_many_tokens()"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "MOE_METAL_DEVICES": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True)


@pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="only the simulated device lets us choose the order of threads"
)
@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_same_bits_in_any_order_of_threads(case: Case, mps: str):
    """The simulator runs each dispatch once in each order and compares all bytes of memory."""
    import metal_sim

    try:
        metal_sim.set_orders("forward", "backward", "random:1", "random:2")
        got = run(case, case.arguments(mps))
    finally:
        metal_sim.set_orders("forward")
    assert_matches(got, case.expected(), case.longest_sum)


@pytest.mark.parametrize("T, dtype", [(200, BFLOAT), (600, FLOAT)], ids=["T200-bf16", "T600-f32"])
@EACH
def test_same_bits_for_any_number_of_threads(case: Case, T: int, dtype: torch.dtype):
    """With few tokens and many threads, `gate` distributes its experts instead. With many tokens and few threads, an
    item of `linear` has more rows."""
    sizes = {"H": 200, "I": 150, "S": 700} if case.format == "dense" else {"H": 192, "I": 96}
    sizes["N"] = 600
    sizes |= {"H": 256, "I": 256} if case.format == "q4_k" else {}
    sizes = {} if "offsets" in case.given else sizes
    case = replace(case, dims=case.dims | {"T": T} | sizes, dtype=dtype)
    args = case.arguments()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(case, args, "cpu")
        for threads in (2, 3, 8, 16):
            torch.set_num_threads(threads)
            assert all(same_bits(a, b) for a, b in zip(run(case, args, "cpu"), one, strict=True))
    finally:
        torch.set_num_threads(before)


def test_same_bits_from_new_threads():
    """In a PyTorch with MKL and on two or more cores, the first call of at::get_num_threads() on a new OpenMP thread
    returns 1, until some thread has set the number. Each new Python thread gets new OpenMP threads."""
    script = """
from threading import Thread
import torch, torch_moe_metal
x, weights, ids = torch.randn(4, 64), torch.rand(4, 2), torch.arange(8).view(4, 2)
gate_up, down = torch.randn(8, 256, 64), torch.randn(8, 64, 128)
got = []
def experts():
    got.append(torch.ops.moe_metal.experts(x, weights, ids, gate_up, down))
for _ in range(8):
    thread = Thread(target=experts)
    thread.start()
    thread.join()
torch.set_num_threads(1)
experts()
assert len(got) == 9 and all(torch.equal(each, got[-1]) for each in got)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)  # a process that wrote past an end may hang


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_same_bits_for_any_number_of_threads_of_a_long_context(dtype: torch.dtype):
    """For few queries the CPU splits the keys, in the same way for any number of threads."""
    case = Case("attention", "threads", {"B": 1, "A": 6, "J": 2, "T": 2, "S": 9000, "D": 32, "V": 24}, ("sinks",))
    args = replace(case, dtype=dtype).arguments()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(case, args, "cpu")
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert all(same_bits(a, b) for a, b in zip(run(case, args, "cpu"), one, strict=True))
    finally:
        torch.set_num_threads(before)


def test_attention_without_room_for_scores():
    """The scores of a million queries and keys would not fit into memory."""
    T = 2**20
    q, v = torch.ones(1, 1, 1, 1).expand(1, 1, T, 1), torch.arange(T, dtype=torch.float32).view(1, 1, T, 1)
    got = torch.ops.moe_metal.attention(q, q, v, causal=True, window=3)
    want = (v.flatten() - 1).clamp(min=0)
    want[1] = 0.5
    assert torch.allclose(got.flatten(), want, rtol=1e-6)


@EACH
def test_batch_invariance(case: Case, device: str):
    """NaN in one token must not change the results of other tokens. Skipped for ops without tokens."""
    args = case.arguments()
    clean = run(case, args, device)
    for name, letters in case.shapes.items():
        if letters[0] == "T" and args[name].is_floating_point():
            args[name][2] = float("nan")
    others = torch.arange(6) != 2
    for got, want in zip(run(case, args, device), clean, strict=True):
        kept = others if case in PER_TOKEN else ...
        assert torch.equal(got.cpu()[kept], want.cpu()[kept])


@pytest.mark.parametrize("scalars", [1, 67])
@pytest.mark.parametrize("op", ["norm_add", "residual_norm"])
def test_weight_and_scalar_whose_product_is_infinite(op: str, device: str, scalars: int):
    """They are multiplied one after the other, as in the reference: 0 stays 0."""
    args = ODD[op].arguments()
    args["residual"][2:] = args["input"][2:] = 0
    args |= {"weight": torch.full((67,), 1e30), "scalar": torch.full((scalars,), 1e30)}
    want = expected(op, args, {}, hostile=True)
    assert want[0][2:].eq(0).all()
    assert_matches(run(replace(ODD[op], options={}), args, device), want)


@pytest.mark.parametrize("select_bias", [None, torch.zeros(4)], ids=["by_logits", "by_scores"])
def test_sqrt_softplus_beyond_float32(device: str, select_bias: Tensor | None):
    """softplus(-106) is 1e-46; its root 1e-23 matters relative to the 1e-20 that is added to the sum of the weights."""
    args = {"logits": torch.tensor([[-100.0, -104, -106, -120], [-19.9, -20, -20.1, -21], [-170, -171, -172, -173]])}
    args |= {} if select_bias is None else {"select_bias": select_bias}
    for K, renormalize in ((1, "before_scale"), (4, "none")):
        case = Case("route", "tiny", {"T": 3, "E": 4, "K": K}, options={"top_k": K, "scoring": "sqrt_softplus"})
        case = replace(case, options=case.options | {"renormalize": renormalize})
        weights, ids = run(case, args, device)
        want, want_ids = expected("route", args, case.options)
        assert torch.equal(ids.cpu(), want_ids)
        torch.testing.assert_close(weights.cpu().double(), want.double(), rtol=1e-5, atol=1e-37)


# ------------------------------------------------------------------------------------------------ large tensors


@pytest.mark.parametrize("H, dtype", [(2048, BFLOAT), (2047, FLOAT)], ids=["aligned-bf16", "not_aligned-f32"])
def test_outputs_larger_than_caches(dtype: torch.dtype, H: int):
    """The CPU's residual_norm uses non-temporal stores for outputs of 8 MiB and more with aligned rows."""
    case = Case("residual_norm", "large", {"T": 2100, "H": H}, dtype=dtype)
    args = case.arguments()
    assert_matches(run(case, args, "cpu"), expected(case.op, args, case.options), case.longest_sum)


def far_apart(rows: int, row: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[rows, size] with a distance of `row` elements between rows. Pages that are never touched need no memory."""
    return torch.empty((rows - 1) * row + size, dtype=dtype, device=device).as_strided((rows, size), (row, 1))


@pytest.mark.full_grid
@pytest.mark.slow
def test_glu_beyond_32_bits(device: str):
    gate, up = (far_apart(3, 2**31 + 5, 129, torch.float16, device) for _ in range(2))
    for tensor in (gate, up):
        tensor.copy_(torch.randn(3, 129, generator=torch.Generator().manual_seed(1)))
    got = torch.ops.moe_metal.glu(gate, up)
    assert_matches([got], expected("glu", {"gate": gate.cpu(), "up": up.cpu()}, {}))


@pytest.mark.full_grid
@pytest.mark.slow
@pytest.mark.parametrize("T", [2, 40])
def test_expert_weights_beyond_32_bits(device: str, T: int):
    """2^32 elements between the first and the last expert; only those two have values."""
    small = Case("experts", f"far-T{T}", {"T": T, "E": 2, "K": 2, "H": 24, "I": 16}, dtype=BFLOAT)
    args = small.arguments(device)
    far = dict(args)
    for name in ("gate_up", "down"):
        shape, step = args[name].shape[1:], 2**32 // 1022
        weights = torch.empty(1023 * step + shape.numel(), dtype=BFLOAT, device=device)
        far[name] = weights.as_strided((1024, *shape), (step, shape[1], 1))
        far[name][0], far[name][1023] = args[name]
    far["ids"] = args["ids"] * 1023
    got = call(torch.ops.moe_metal.experts, "experts", far, {})
    assert_matches(got, expected("experts", small.arguments(), {}), small.longest_sum)


@pytest.mark.full_grid
@pytest.mark.slow
@pytest.mark.parametrize("op", ["route", "gate", "weighted_sum", "norm_add"])
def test_activations_beyond_31_bits(op: str):
    """More than 2^31 elements, all zero except the last tokens, whose results must not depend on the others."""
    rows = {"route": (2**21 + 1, {"E": 1024, "K": 4}), "gate": (2**19 + 1, {"E": 5, "K": 4, "H": 4096})}
    rows |= {"weighted_sum": (2**15 + 1, {"K": 1024, "H": 64}), "norm_add": (2**18 + 1, {"H": 8192})}
    T, dims = rows[op]
    case = Case(op, "tail", dims | {"T": 3}, (), {"top_k": 4} if op in ("route", "gate") else {}, BFLOAT)
    tail = case.arguments()
    args = dict(tail)
    for name, letters in case.shapes.items():
        if letters[0] == "T":
            args[name] = torch.zeros(T, *tail[name].shape[1:], dtype=tail[name].dtype)
            args[name][-3:] = tail[name]
    got = [tensor[-3:] for tensor in run(case, args)]
    assert_matches(got, expected(op, tail, case.options), case.longest_sum)
