"""The contract of every op on every device: one test per rule, over the table of cases."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from cases import BFLOAT, CASES, FLOAT, SAMPLES, Args, Case, call, expected
from checks import Guarded, assert_matches, bits, meets_infinity, same_bits, with_leading
from conftest import DEVICES, SIMULATED
from torch_moe_metal import formats
from torch_moe_metal.arguments import ARGUMENTS, format_of, written

OPS = tuple(ARGUMENTS)
IN_PLACE = tuple(op for op in OPS if written(op))
ODD = {case.op: case for case in SAMPLES if case.name == "sample_odd"}
PACKED = {f"{case.op} {case.name.removeprefix('sample_')}": case for case in SAMPLES if case.format != "dense"}
GOOD = ODD | PACKED  # every op, and every format of weights: "gate", "linear affine4"
EACH = pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
EACH_OP = pytest.mark.parametrize("case", ODD.values(), ids=ODD)
PER_TOKEN = [case for case in SAMPLES if next(iter(case.shapes.values()))[0] == "T"]


def run(case: Case, args: Args, device: str | None = None) -> list[Tensor]:
    """The op's outputs on a device; the default is that of the arguments."""
    if device is not None:
        args = {name: tensor.to(device, copy=True) for name, tensor in args.items()}
    return call(getattr(torch.ops.moe_metal, case.op), case.op, args, case.options)


def moved(case: Case, device: str) -> Args:
    """The case's arguments on a device, with the strides of the case, including 0."""

    def move(tensor: Tensor) -> Tensor:
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: move(tensor) for name, tensor in case.arguments().items()}


# ------------------------------------------------------------------------------------------------ right answers


@pytest.mark.cases(CASES)
def test_equals_the_reference(device: str, case: Case, roundings: float = 1):
    args = moved(case, device)
    want = case.expected()
    before = {name: bits(tensor) for name, tensor in args.items()}
    got = run(case, args)
    any_infinity = meets_infinity(case.op, args, case.options, device)
    assert_matches(got, want, case.longest_sum, any_infinity, roundings)
    assert all(tensor.is_contiguous() for tensor in got)
    for name, tensor in args.items():
        if name not in written(case.op):
            assert torch.equal(bits(tensor), before[name]), f"{name} has changed"


@pytest.mark.skipif("cpu" not in DEVICES, reason="only the CPU has several instruction sets")
def test_samples_on_the_default_instruction_set():
    """All other tests use the machine's best instruction set. This one finds errors that only others have."""
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-k",
        "equals_the_reference and sample",
        __file__,
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "MOE_METAL_DEVICES": "cpu"}
    done = subprocess.run((*command, "-p", "no:cacheprovider"), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]  # 5 if no test was selected


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
            (offset + place * (offset > 0)) * (2 if has_own_scales(case, name) else 1),
        )
        for place, (name, tensor) in enumerate(args.items())
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


# ------------------------------------------------------------------------------------------------ PyTorch's rules


@EACH_OP
def test_opcheck(case: Case):
    """On the CPU with dense weights: schema, fake function and dispatch keys are the same on every device and for every
    format. `test_compiles_once_on_mps` compares the results on mps with the fake function."""
    args = case.arguments()
    positional = tuple(args.get(name) for name in ARGUMENTS[case.op])
    torch.library.opcheck(getattr(torch.ops.moe_metal, case.op).default, positional, case.options)


def compiles_once(case: Case, device: str, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda args: run(case, args), fullgraph=True, backend=counter)
    for T in (6, 9, 33):
        case = replace(case, dims=case.dims | {"T": T})
        args = case.arguments(device)
        want = run(case, args, device)
        for name, letters in case.shapes.items():
            if "T" in letters:
                torch._dynamo.mark_dynamic(args[name], letters.index("T"))
        assert all(same_bits(a, b) for a, b in zip(compiled(args), want, strict=True))
    assert counter.frame_count == 1


@EACH
def test_compiles_once_for_any_number_of_tokens(case: Case):
    """The whole graph without breaks, with a single compilation, and bitwise equal to eager."""
    compiles_once(case, "cpu", "aot_eager")


@EACH_OP
def test_compiles_once_on_mps(case: Case, mps: str):
    compiles_once(case, mps, "aot_eager")


@EACH_OP
def test_compiles_with_inductor(case: Case):
    compiles_once(case, "cpu", "inductor")


@EACH
def test_input_that_requires_grad_raises(case: Case, device: str):
    want = run(case, case.arguments(), device)
    for name in case.shapes:
        args = case.arguments(device)
        if not args[name].is_floating_point():
            continue
        leaf = args[name].requires_grad_()
        args[name] = leaf.view_as(leaf)  # not a leaf, so that autograd allows in-place writes
        message = f"moe_metal::{case.op}: {name}: expected a tensor that does not require grad"
        with torch.enable_grad(), pytest.raises(RuntimeError, match=re.escape(message)):
            run(case, args)
        with torch.no_grad():
            got = run(case, args)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_lazily_cloned_inputs_are_read_and_not_copied(case: Case):
    """Two tensors share memory until one of them is written: no op may give an input memory of its own."""
    op = getattr(torch.ops.moe_metal, case.op)
    want = call(op, case.op, case.arguments(), case.options)
    args = {name: torch._lazy_clone(tensor) for name, tensor in case.arguments().items()}
    got = call(op, case.op, args, case.options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert {name for name, tensor in args.items() if not torch._C._is_cow_tensor(tensor)} == set(written(case.op))


@EACH
def test_inference_mode(case: Case, device: str):
    want = run(case, case.arguments(), device)
    with torch.inference_mode():
        got = run(case, case.arguments(), device)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_ops_bump_the_version(op: str, device: str, mode: type):
    """Once per call, also if the kernel copies its result into a tensor that is not contiguous."""
    for kind in ("contiguous", "strided"):
        args = {name: Guarded(tensor.to(device), kind).view for name, tensor in ODD[op].arguments().items()}
        versions = {name: tensor._version for name, tensor in args.items()}
        with mode():
            run(ODD[op], args)
        assert {name: args[name]._version - versions[name] for name in args} == {
            name: int(name in written(op)) for name in args
        }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_compiled_in_place_ops_bump_the_version(op: str, device: str, mode: type):
    """As often as PyTorch's own compiled in-place ops."""

    def bumps(write: Callable[[Args], object]) -> int:
        torch._dynamo.reset()
        args = ODD[op].arguments(device)
        before = args["residual"]._version
        with mode():
            torch.compile(write, fullgraph=True, backend="aot_eager")(args)
        return args["residual"]._version - before

    assert bumps(lambda args: run(ODD[op], args)) == bumps(lambda args: args["residual"].add_(1)) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", IN_PLACE)
def test_backward_raises_after_in_place_overwrite(op: str, device: str, mode: type):
    args = ODD[op].arguments(device)
    factor = torch.ones_like(args["residual"], requires_grad=True)
    product = factor * args["residual"]
    with mode():
        run(ODD[op], args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_ops_on_inference_tensors(op: str, device: str):
    """PyTorch's own rule. The other arguments, such as a model's weights, are no inference tensors."""
    case = ODD[op]
    args = case.arguments(device)
    want = run(case, args, device)
    with torch.inference_mode():
        args["residual"] = args["residual"].clone()
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert "Inplace update to inference tensor outside InferenceMode" in refusal(op, args, case.options)
    with torch.inference_mode():
        got = run(case, args)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def differentiable(case: Case) -> list[str]:
    return [name for name, tensor in case.arguments().items() if tensor.is_floating_point()]


#: Ops with a floating-point argument: a weight in mxfp4 has none.
DIFFERENTIABLE = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in GOOD.items() if differentiable(case)]
)


def copies(args: Args) -> Args:
    return {name: tensor.clone() for name, tensor in args.items()}


def function_of(case: Case, args: Args, name: str) -> Callable[[Tensor], Tensor]:
    """The op's first output as a function of one argument, without in-place writes."""
    return lambda tensor: run(case, copies(args | {name: tensor}))[0]


def no_jvp(op: str, name: str) -> str:
    return re.escape(
        f"moe_metal::{op}: {name}: expected a tensor without a tangent (forward-mode AD), since this op has no jvp; "
        "got one with a tangent. Pass tensor.detach()"
    )


@EACH
def test_tangent_raises(case: Case, device: str):
    want = run(case, case.arguments(device))
    for name in differentiable(case):
        args = case.arguments(device)
        plain = args[name]
        with forward_ad.dual_level():
            args[name] = forward_ad.make_dual(plain, torch.ones_like(plain))
            for mode in (torch.enable_grad, torch.no_grad):  # no_grad only disables backward
                with mode(), pytest.raises(RuntimeError, match=no_jvp(case.op, name)):
                    run(case, args)
            got = run(case, copies(args | {name: args[name].detach()}))
            with torch.inference_mode():  # PyTorch's own ops have no tangents in inference mode either
                in_inference_mode = run(case, copies(args))
        for outputs in (got, in_inference_mode):
            assert all(same_bits(a, b) for a, b in zip(outputs, want, strict=True))


@EACH_OP
def test_tangent_raises_compiled(case: Case):
    """A tangent made in the graph, and one that comes from outside."""
    op, args = case.op, case.arguments()
    name = differentiable(case)[0]
    function, point = function_of(case, args, name), args[name]
    with pytest.raises(RuntimeError, match=no_jvp(op, name)):
        torch.compile(lambda x: torch.func.jvp(function, (x,), (x,)), backend="aot_eager")(point)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=no_jvp(op, name)):
        torch.compile(function, backend="aot_eager")(forward_ad.make_dual(point, torch.ones_like(point)))


@DIFFERENTIABLE
def test_function_transforms(case: Case):
    """torch.func: derivatives with respect to an argument of the op raise, all others are correct."""
    op, args = case.op, case.arguments()
    for name in differentiable(case):
        function, point = function_of(case, args, name), args[name]
        no_backward = f"moe_metal::{op}: {name}: expected a tensor that does not require grad"
        for mode in MODES:
            with mode(), pytest.raises(RuntimeError, match=no_jvp(op, name)):
                torch.func.jvp(function, (point,), (point,))
            with mode(), pytest.raises(RuntimeError, match=no_backward):
                torch.func.grad(lambda x, function=function: function(x).sum())(point)
            with mode(), pytest.raises(RuntimeError, match=no_backward):
                torch.func.vjp(function, point)
    (output, _), (none, tangent) = torch.func.jvp(lambda x: (function(point), x.sin()), (point,), (point,))
    assert same_bits(output, function(point)) and same_bits(tangent, point * point.cos()) and not none.any()


@EACH
def test_vmap(case: Case):
    """PyTorch calls the op once per sample; for in-place ops it raises."""
    op, args = case.op, case.arguments()
    for name in differentiable(case):
        function, points = function_of(case, args, name), torch.stack([args[name], args[name] * 2])
        if written(op):
            with pytest.raises(RuntimeError, match=f"Batching rule not implemented for moe_metal::{op}"):
                torch.func.vmap(function)(points)
        else:
            assert same_bits(torch.func.vmap(function)(points), torch.stack([function(point) for point in points]))


@EACH
def test_optional_arguments_may_be_none(case: Case, device: str):
    case = replace(case, given=())
    args = case.arguments(device)
    nones = {name: None for name, argument in ARGUMENTS[case.op].items() if argument.optional and name not in args}
    got = run(case, args | nones)
    assert_matches(got, case.expected(), case.longest_sum)


# ------------------------------------------------------------------------------------------------ bad input


def bad(op: str, message: str, **changes):
    """`changes`: for an argument, a function of the good tensor, or the bad value itself."""
    return pytest.param(op, message, changes, id=f"{op}-{'+'.join(changes)}-{message.split(', got')[0][:50]}")


def cut(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


def first_token(tensor: Tensor) -> Tensor:
    return tensor[:1]


def no_columns(tensor: Tensor) -> Tensor:
    return tensor[..., :0]


def extra_dim(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


# The good arguments are sample_odd's: T 6, E 13, K 3, H 67, I 19, float32.
BAD = [
    bad("gate", "hidden: expected float32, float16 or bfloat16, got float64", hidden=Tensor.double),
    bad("gate", "hidden: expected float32, float16 or bfloat16, got int32", hidden=Tensor.int),
    bad("gate", "hidden: expected float32, float16 or bfloat16, got uint8", hidden=Tensor.byte),
    bad("route", "logits: expected float32, float16 or bfloat16, got complex64", logits=Tensor.cfloat),
    bad("gate", "hidden: expected shape [*, H], got []", hidden=torch.tensor(1.0)),
    bad("gate", "hidden: expected H >= 1, got 0", hidden=no_columns, router_weight=no_columns, norm_weight=no_columns),
    bad("gate", "router_weight: expected shape [E, H] with E = 13, H = 67, got [13, 66]", router_weight=cut),
    bad("gate", "router_weight: expected shape [E, H] with H = 67, got [1, 13, 67]", router_weight=extra_dim),
    bad("gate", "router_weight: expected float32, the dtype of hidden; got float16", router_weight=Tensor.half),
    bad("gate", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut),
    bad("gate", "router_bias: expected shape [E] with E = 13, got [12]", router_bias=cut),
    bad("gate", "select_bias: expected shape [E] with E = 13, got [12]", select_bias=cut),
    bad("gate", "per_expert_scale: expected float32, the dtype of hidden; got bfloat16",
        per_expert_scale=Tensor.bfloat16),
    bad("gate", "top_k: expected 1 to 13 (E), got 0", top_k=0),
    bad("gate", "top_k: expected 1 to 13 (E), got 14", top_k=14),
    bad("gate", "eps: expected a finite number >= 0, got -1", eps=-1.0),
    bad("gate", "eps: expected a finite number >= 0, got nan", eps=float("nan")),
    bad("gate", "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
    bad("gate", "scaling_factor: expected a finite number, got nan", scaling_factor=float("nan")),
    bad("route", "logits: expected float32, float16 or bfloat16, got int64", logits=Tensor.long),
    bad("route", "E: expected 1 to 1024 (the number of experts), got 0", logits=no_columns, select_bias=no_columns,
        per_expert_scale=no_columns),
    bad("route", "E: expected 1 to 1024 (the number of experts), got 1025",
        logits=torch.zeros(2, 1025), select_bias=None,
        per_expert_scale=None),
    bad("route", "select_bias: expected shape [E] with E = 13, got [6, 13]", select_bias=lambda t: t.expand(6, 13)),
    bad("route", "top_k: expected 1 to 13 (E), got -1", top_k=-1),
    bad("route", "n_group: expected 1 to 13 (E), got 0", n_group=0),
    bad("route", "n_group: expected a divisor of E = 13, got 2", n_group=2),
    bad("route", "topk_group: expected 1 to 13 (n_group), got 14", n_group=13, topk_group=14),
    bad("route", "topk_group: expected 1 to 1 (n_group), got 0", topk_group=0),
    bad("route", "top_k: expected 1 to 2 (the experts in topk_group groups), got 3", n_group=13, topk_group=2),
    bad("route", "scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'tanh'", scoring="tanh"),
    bad("route", "renormalize: expected one of none, before_scale, after_scale; got 'yes'", renormalize="yes"),
    bad("route", r"scoring: expected one of softmax, sigmoid, sqrt_softplus; got 'soft\x00max'", scoring="soft\0max"),
    bad("route", "group_score: expected one of top2_sum, max; got ''", group_score=""),
    bad("route", "softcap: expected a finite number >= 0, got -5", softcap=-5.0),
    bad("route", "softcap: expected a finite number >= 0, got -1e-46, which is -0 as float32", softcap=-1e-46),
    bad("route", "softcap: expected a finite number >= 0, got 1e+39, which is inf as float32", softcap=1e39),
    bad("route", "softcap: expected 0 or a finite number > 0, got 1e-46, which is 0 as float32", softcap=1e-46),
    bad("route", "scaling_factor: expected a finite number, got -inf", scaling_factor=-float("inf")),
    bad("route", "scaling_factor: expected a finite number, got 1e+39, which is inf as float32", scaling_factor=1e39),
    bad("glu", "gate: expected float32, float16 or bfloat16, got bool", gate=Tensor.bool),
    bad("glu", "up: expected float32, the dtype of gate; got float16", up=Tensor.half),
    bad("glu", "up: expected shape [*, I] with * = [6], I = 19, got [6, 18]", up=cut),
    bad("glu", "up: expected shape [*, I] with * = [6], I = 19, got [1, 19]", up=first_token),
    bad("glu", "gate: expected I >= 1, got 0", gate=no_columns, up=no_columns),
    bad("glu", "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai; got 'swish'", activation="swish"),
    bad("glu", "limit: expected a number > 0 or None, got 0", limit=0.0),
    bad("glu", "limit: expected a number > 0 or None, got nan", limit=float("nan")),
    bad("glu", "limit: expected a number > 0 or None, got 1e-46, which is 0 as float32", limit=1e-46),
    bad("glu", "alpha: expected a finite number, got nan", alpha=float("nan")),
    bad("glu", "alpha: expected a finite number, got -1e+39, which is -inf as float32", alpha=-1e39),
    bad("experts", "x: expected H >= 1, got 0", x=no_columns),
    bad("experts", "weights: expected shape [*, K] with * = [6], got [1, 3]", weights=first_token),
    bad("experts", "weights: expected float32, the dtype of x; got float16", weights=Tensor.half),
    bad("experts", "ids: expected shape [*, K] with * = [6], K = 3, got [6, 2]", ids=cut),
    bad("experts", "ids: expected int32 or int64, got float32", ids=Tensor.float),
    bad("experts", "ids: expected int32 or int64, got int16", ids=Tensor.short),
    bad("experts", "ids: expected int32 or int64, got int8", ids=Tensor.char),
    bad("experts", "ids: expected K >= 1, got 0", weights=no_columns, ids=no_columns),
    bad("experts", "down: expected shape [E, H, I] with E = 13, H = 67, got [13, 66, 19]", down=lambda t: t[:, :-1]),
    bad("experts", "down: expected shape [E, I, H] with E = 13, I = 67, H = 67, got [13, 67, 19]", transposed=True),
    bad("experts", "down: expected float32, the dtype of x; got bfloat16", down=Tensor.bfloat16),
    bad("experts", "down: expected 1 to 4611686018427387903 (its inner size, I), got 0", down=no_columns),
    bad("experts", "down: expected 1 to 1024 (its number of experts, E), got 0", down=lambda t: t[:0]),
    bad("experts", "gate_up: expected shape [E, 2I, H] with E = 13, 2I = 38, H = 67, got [13, 37, 67]",
        gate_up=lambda t: t[:, :-1]),
    bad("experts", "gate_up: expected shape [E, 2I, H] with E = 13, 2I = 38, H = 67, got [12, 38, 67]",
        gate_up=lambda t: t[:-1]),
    bad("experts", "gate_up_bias: expected shape [E, 2I] with E = 13, 2I = 38, got [13, 37]", gate_up_bias=cut),
    bad("experts", "down_bias: expected shape [E, H] with E = 13, H = 67, got [13, 66]", down_bias=cut),
    bad("experts", "shared: expected shape [*, H] with * = [6], H = 67, got [1, 67]", shared=first_token),
    bad("experts", "shared: expected float32, the dtype of x; got float16", shared=Tensor.half),
    bad("experts", "shared_gate: expected shape [*] with * = [6], got [6, 1]", shared_gate=lambda t: t.unsqueeze(-1)),
    bad("experts", "shared_gate: expected `shared` as well, got none", shared=None),
    bad("experts", "residual: expected shape [*, H] with * = [6], H = 67, got [6, 66]", residual=cut),
    bad("experts", "activation: expected one of silu, gelu, gelu_tanh, relu2, swiglu_oai; got 'relu'",
        activation="relu"),
    bad("experts", "limit: expected a number > 0 or None, got -7", limit=-7.0),
    bad("experts", "alpha: expected a finite number, got inf", alpha=float("inf")),
    bad("weighted_sum", "slots: expected shape [*, K, H], got [67]", slots=lambda t: t[0, 0]),
    bad("weighted_sum", "slots: expected K >= 1, got 0", slots=lambda t: t[:, :0], weights=no_columns),
    bad("weighted_sum", "slots: expected H >= 1, got 0", slots=no_columns),
    bad("weighted_sum", "weights: expected shape [*, K] with * = [6], K = 3, got [6, 2]", weights=cut),
    bad("weighted_sum", "shared: expected shape [*, H] with * = [6], H = 67, got [6, 66]", shared=cut),
    bad("weighted_sum", "shared_gate: expected `shared` as well, got none", shared=None),
    bad("weighted_sum", "shared_gate: expected shape [*] with * = [6], got [5]", shared_gate=cut),
    bad("weighted_sum", "residual: expected float32, the dtype of slots; got float64", residual=Tensor.double),
    bad("weighted_sum_norm_add", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut),
    bad("weighted_sum_norm_add", "residual: expected shape [*, H] with * = [6], H = 67, got [1, 67]",
        residual=first_token),
    bad("weighted_sum_norm_add", "eps: expected a finite number >= 0, got inf", eps=float("inf")),
    bad("weighted_sum_dual_norm_add", "moe_norm_weight: expected shape [H] with H = 67, got [66]", moe_norm_weight=cut),
    bad("weighted_sum_dual_norm_add", "residual_norm_weight: expected float32, the dtype of slots; got float16",
        residual_norm_weight=Tensor.half),
    bad("weighted_sum_dual_norm_add", "eps: expected a finite number >= 0, got -1", eps=-1.0),
]  # fmt: skip


HEADS = "B = 2, J = 2, S = 21"
# sample_odd of attention: B 2, A 6, J 2, T 6, S 21, D 19, V 23.
BAD += [
    bad("attention", "q: expected float32, float16 or bfloat16, got float64", q=Tensor.double),
    bad("attention", "q: expected shape [B, A, T, D], got [6, 6, 19]", q=lambda t: t[0]),
    bad("attention", "q: expected A >= 1, got 0", q=lambda t: t[:, :0]),
    bad("attention", "q: expected D >= 1, got 0", q=no_columns, k=no_columns),
    bad("attention", f"k: expected shape [B, J, S, D] with {HEADS}, D = 19, got [2, 2, 21, 18]", k=cut),
    bad("attention", "k: expected shape [B, J, S, D] with B = 2, D = 19, got [1, 2, 21, 19]", k=first_token),
    bad("attention", "k: expected float32, the dtype of q; got bfloat16", k=Tensor.bfloat16),
    bad("attention", "k: expected J >= 1, got 0", k=lambda t: t[:, :0]),
    bad("attention", "k: expected J to be a divisor of A = 6, got 4", k=lambda t: t.repeat(1, 2, 1, 1)),
    bad("attention", f"v: expected shape [B, J, S, V] with {HEADS}, got [2, 1, 21, 23]", v=lambda t: t[:, :1]),
    bad("attention", f"v: expected shape [B, J, S, V] with {HEADS}, got [2, 2, 20, 23]", v=lambda t: t[:, :, 1:]),
    bad("attention", "v: expected float32, the dtype of q; got float16", v=Tensor.half),
    bad("attention", "v: expected V >= 1, got 0", v=no_columns),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[2, 6, 6, 20]", mask=cut),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[2, 2, 6, 21]", mask=lambda t: t[:, :2]),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[1, 1, 1, 21]", mask=lambda t: t[:1, :1, :1]),
    bad("attention", "mask: expected shape [B, A, T, S] with B = 2, A = 6, T = 6, S = 21, and 1 for B or A; got "
        "[6, 21]", mask=lambda t: t[0, 0]),
    bad("attention", "mask: expected bool or float32, the dtype of q; got float16", mask=Tensor.half),
    bad("attention", "mask: expected bool or float32, the dtype of q; got int64", mask=Tensor.long),
    bad("attention", "mask: expected bool, float32 or float16, the dtype of q; got bfloat16", mask=Tensor.bfloat16,
        **dict.fromkeys("qkv", Tensor.half)),
    bad("attention", "sinks: expected shape [A] with A = 6, got [5]", sinks=cut),
    bad("attention", "sinks: expected float32, the dtype of q; got float64", sinks=Tensor.double),
    bad("attention", "scale: expected a finite number, got nan", scale=float("nan")),
    bad("attention", "scale: expected a finite number, got 1e+39, which is inf as float32", scale=1e39),
    bad("attention", "window: expected a number >= 0, got -1", window=-1),
    bad("attention", "window: expected 0 where causal is False, got 9", causal=False),
    bad("attention", "softcap: expected a finite number >= 0, got -5", softcap=-5.0),
    bad("attention", "softcap: expected 0 or a finite number > 0, got 1e-46, which is 0 as float32", softcap=1e-46),
]  # fmt: skip


# sample_odd of rope: B 2, A 6, J 2, T 6, D 19, R 7.
ANGLES = "expected shape [B, T, R] with B = 2, T = 6"
BAD += [
    bad("rope", "q: expected float32, float16 or bfloat16, got float64", q=Tensor.double),
    bad("rope", "q: expected shape [B, T, A, D], got [6, 6, 19]", q=lambda t: t[0]),
    bad("rope", "q: expected A >= 1, got 0", q=lambda t: t[:, :, :0]),
    bad("rope", "q: expected 2 to 9223372036854775807 (its size of a head, D), got 1", q=lambda t: t[..., :1]),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, J = 2, D = 19, got [2, 6, 2, 18]", k=cut),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, D = 19, got [1, 6, 2, 19]", k=first_token),
    bad("rope", "k: expected shape [B, T, J, D] with B = 2, T = 6, D = 19, got [2, 5, 2, 19]", k=lambda t: t[:, 1:]),
    bad("rope", "k: expected float32, the dtype of q; got float16", k=Tensor.half),
    bad("rope", "k: expected J >= 1, got 0", k=lambda t: t[:, :, :0]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [6, 7]", cos=lambda t: t[0]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [2, 1, 7]", cos=lambda t: t[:, :1]),
    bad("rope", f"cos: {ANGLES}, and 1 for B; got [4, 6, 7]", cos=lambda t: t.repeat(2, 1, 1)),
    bad("rope", "cos: expected float32, the dtype of q; got bfloat16", cos=Tensor.bfloat16),
    bad("rope", f"sin: {ANGLES}, R = 7, and 1 for B; got [2, 6, 6]", sin=cut),
    bad("rope", f"sin: {ANGLES}, R = 7, and 1 for B; got [0, 6, 7]", sin=lambda t: t[:0]),
    bad("rope", "sin: expected float32, the dtype of q; got int64", sin=Tensor.long),
    bad("rope", "cos: expected 1 to 9 (the pairs of a head, R), got 14",
        **dict.fromkeys(("cos", "sin"), lambda t: torch.cat([t, t], -1))),
    bad("rope", "cos: expected 1 to 9 (the pairs of a head, R), got 0", cos=no_columns, sin=no_columns),
    bad("rope", "q_norm_weight: expected shape [D] with D = 19, got [18]", q_norm_weight=cut),
    bad("rope", "q_norm_weight: expected shape [A, D] with A = 6, D = 19, got [2, 19]",
        q_norm_weight=lambda t: t.expand(2, 19)),
    bad("rope", "k_norm_weight: expected shape [J, D] with J = 2, D = 19, got [6, 19]",
        k_norm_weight=lambda t: t.expand(6, 19)),
    bad("rope", "k_norm_weight: expected shape [D] with D = 19, got [1, 2, 19]",
        k_norm_weight=lambda t: t.expand(1, 2, 19)),
    bad("rope", "k_norm_weight: expected float32, the dtype of q; got float64", k_norm_weight=Tensor.double),
    bad("rope", "eps: expected a finite number >= 0, got -1", eps=-1.0),
    bad("norm", "input: expected float32, float16 or bfloat16, got float64", input=Tensor.double),
    bad("norm", "input: expected shape [*, H], got []", input=torch.tensor(1.0)),
    bad("norm", "input: expected H >= 1, got 0", input=no_columns, weight=None),
    bad("norm", "weight: expected shape [H] with H = 67, got [66]", weight=cut),
    bad("norm", "weight: expected float32, the dtype of input; got float16", weight=Tensor.half),
    bad("norm", "eps: expected a finite number >= 0, got -0.001", eps=-0.001),
    bad("norm", "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
]  # fmt: skip


def every_second(tensor: Tensor) -> Tensor:
    """The same values, two elements apart."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def floats(tensor: Tensor) -> Tensor:
    return tensor.float()


WIDTHS = "bits 2, 3, 4, 5, 6 or 8"
GROUPS = "group 16, 32, 64 or 128"
FORMATS = f"format: expected one of {', '.join(dict.fromkeys(row.name for row in formats.ROWS))}; got "
# sample_affine4: T 6, E 7, K 3, H 96, I 32, N 37, groups of 32, float32; sample_mxfp4: H 160, I 96, N 33, bfloat16;
# sample_fp8: H 130, I 70, N 200, float16; sample_nvfp4: H 112, I 48, N 35, float16; sample_q4_k: H 256, I 256, N 34,
# bfloat16, and down in q6_k.
BAD += [
    bad("linear", FORMATS + "'int4'", format="int4"),
    bad("linear", "x: expected H >= 1, got 0", x=no_columns, weight=no_columns),
    bad("linear", "weight: expected shape [N, H] with N = 37, H = 67, got [37, 66]", weight=cut),
    bad("linear", "weight: expected shape [N, H] with H = 67, got [1, 37, 67]", weight=extra_dim),
    bad("linear", "weight: expected N >= 1, got 0", weight=lambda t: t[:0], bias=None),
    bad("linear", "weight: expected float32, the dtype of x; got float16", weight=Tensor.half),
    bad("linear", "weight: expected float32, float16 or bfloat16 in format dense, got uint8", weight=Tensor.byte),
    bad("linear", "bias: expected shape [N] with N = 37, got [36]", bias=cut),
    bad("linear", "bias: expected float32, the dtype of x; got float16", bias=Tensor.half),
    bad("linear", "scale: expected none with format dense, got a tensor", scale=torch.ones(1)),
    bad("linear", "offset: expected none with format dense, got a tensor", offset=torch.ones(1)),
    bad("linear", "group_size: expected 0 with format dense, got 32", group_size=32),
    bad("experts", "group_size: expected 0 with format dense, got -1", group_size=-1),
    bad("dequantize", FORMATS + "''", format=""),
    bad("dequantize", "weight: expected shape [*, N, C], got [67]", weight=lambda t: t[0]),
    bad("dequantize", "dtype: expected float32, float16 or bfloat16, got int32", dtype=torch.int32),
    bad("experts", "gate_up_scale: expected none with format dense, got a tensor", gate_up_scale=torch.ones(1)),
    bad("experts", "down_offset: expected none with format dense, got a tensor", down_offset=torch.ones(1)),
]
for _sample, _data, _letters in (("linear affine4", "weight", "[N"), ("experts affine4", "gate_up", "[E, 2I")):
    _beside = {"weight": ""}.get(_data, f"{_data}_")
    _rows, _sizes = ("37", "N = 37, ") if _data == "weight" else ("7, 64", "E = 7, 2I = 64, ")
    _scale, _offset = f"{_beside}scale", f"{_beside}offset"
    BAD += [
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 47]", **{_data: cut}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 12]", **{_data: lambda t: t[..., :12]}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 84]", **{_data: lambda t: t.repeat_interleave(2, -1)[..., :84]}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 8] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 0]", **{_data: no_columns}),
        bad(_sample, f"{_data}: expected shape {_letters}, H * bits / 32] with {_sizes}H = 96, and {WIDTHS}; got "
            f"[{_rows}, 11]", **{_data: lambda t: t.view(torch.int32)[..., :-1]}),
        bad(_sample, f"{_data}: expected int32, uint32 or uint8 in format affine, got float32", **{_data: floats}),
        bad(_sample, f"{_data}: expected int32, uint32 or uint8 in format affine, got int8",
            **{_data: lambda t: t.view(torch.int8)}),
        bad(_sample, f"{_scale}: expected a tensor with format affine, got none", **{_scale: None}),
        bad(_sample, f"{_offset}: expected a tensor with format affine, got none", **{_offset: None}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 2]", **{_scale: cut}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 12]", **{_scale: lambda t: t.repeat_interleave(4, -1)}),
        bad(_sample, f"{_scale}: expected shape {_letters}, H / group] with {_sizes}H = 96, and {GROUPS}; got "
            f"[{_rows}, 0]", **{_scale: no_columns}),
        bad(_sample, f"{_scale}: expected float32, float16 or bfloat16 in format affine, got float64",
            **{_scale: Tensor.double}),
        bad(_sample, f"{_offset}: expected float32, the dtype of {_scale}; got float16", **{_offset: Tensor.half}),
        bad(_sample, f"{_offset}: expected shape [{_rows}, 3], the shape of {_scale}; got [{_rows}, 2]",
            **{_offset: cut}),
    ]  # fmt: skip
ONE_RUN = "expected rows of contiguous bytes, got strides "
BAD += [
    bad("linear affine4", "weight: " + ONE_RUN + "[96, 2]", weight=every_second),
    bad("linear affine4", "weight: " + ONE_RUN + "[1, 37]", weight=lambda t: t.t().contiguous().t()),
    bad("linear affine4", "weight: " + ONE_RUN + "[48, 0]", weight=lambda t: t[:, :1].expand(-1, 48)),
    bad("linear affine4", "weight: expected shape [N, H * bits / 8], got [1, 37, 48]", weight=extra_dim),
    bad("linear affine4", "weight: expected shape [N, H * bits / 8], got []", weight=lambda t: t[0, 0]),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, got [36, 3]", scale=lambda t: t[1:]),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, got []", scale=torch.tensor(1.0)),
    bad("linear affine4", "scale: expected uint8 in format mxfp4, got float32", format="mxfp4"),
    bad("linear affine4", "bias: expected shape [N] with N = 37, got [36]", bias=cut),
    bad("linear affine4", "group_size: expected 0, 16, 32, 64 or 128 with format affine, got 48", group_size=48),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 96, and group 64; got [37, 3]",
        group_size=64),
    # The same bytes with half and with twice the bits.
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 192, and group 32; got [37, 3]",
        x=lambda t: torch.cat([t, t], 1), group_size=32),
    bad("linear affine4", "scale: expected shape [N, H / group] with N = 37, H = 48, and group 32; got [37, 3]",
        x=lambda t: t[:, :48], group_size=32),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, I = 16, and group 32; got "
        "[7, 96, 1]", group_size=32, gate_up_bias=lambda t: t[:, ::2],
        **dict.fromkeys(("gate_up", "gate_up_scale", "gate_up_offset"), lambda t: t[:, ::2])),
    bad("experts affine4", "transposed: expected False with format affine, got True", transposed=True),
    bad("experts affine4", "gate_up: expected an even number of rows, 2I; got 63", gate_up=lambda t: t[:, 1:],
        gate_up_scale=lambda t: t[:, 1:], gate_up_offset=lambda t: t[:, 1:]),
    bad("experts affine4", "down: expected shape [E, H, I * bits / 8] with E = 7, H = 96, I = 32, and " + WIDTHS
        + "; got [7, 96, 15]", down=cut),
    bad("experts affine4", "down: expected shape [E, H, I * bits / 8] with E = 7, H = 96, got [6, 96, 16]",
        down=lambda t: t[1:]),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, I = 32, and " + GROUPS
        + "; got [7, 96, 4]", down_scale=lambda t: t.repeat_interleave(4, -1)),
    bad("experts affine4", "down_scale: expected shape [E, H, I / group] with E = 7, H = 96, got [7, 95, 1]",
        down_scale=lambda t: t[:, 1:]),
    bad("experts affine4", "down_offset: expected shape [7, 96, 1], the shape of down_scale; got [7, 95, 1]",
        down_offset=lambda t: t[:, 1:]),
    bad("dequantize affine4", "bits: expected 2, 3, 4, 5, 6 or 8, got 7", bits=7),
    bad("dequantize affine4", "bits: expected 2, 3, 4, 5, 6 or 8, got 0", bits=0),
    bad("dequantize affine4", "scale: expected shape [*, N, C / group] with * = [], N = 37, C = 128, and " + GROUPS
        + "; got [37, 3]", bits=3),
    bad("dequantize affine4", "dtype: expected float32, float16 or bfloat16, got float64", dtype=torch.float64),
    bad("dequantize affine4", "scale: expected shape [*, N, C / group] with * = [], N = 37, got [7, 37, 3]",
        scale=lambda t: t.expand(7, -1, -1)),
    bad("linear mxfp4", "weight: expected shape [N, H / 2] with N = 33, H = 160, got [33, 79]", weight=cut),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 5, 15]",
        weight=lambda t: t.unflatten(-1, (5, 16))[..., 1:]),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 4, 16]",
        weight=lambda t: t.unflatten(-1, (5, 16))[:, 1:]),
    bad("linear mxfp4", "weight: expected shape [N, H / 32, 16] with N = 33, H = 160, got [33, 10, 8]",
        weight=lambda t: t.unflatten(-1, (10, 8))),
    bad("linear mxfp4", "weight: " + ONE_RUN + "[80, 1, 5]", weight=lambda t: t.unflatten(-1, (16, 5)).mT),
    bad("linear mxfp4", "weight: expected uint8 in format mxfp4, got int32", weight=lambda t: t.view(torch.int32)),
    bad("linear mxfp4", "scale: expected a tensor with format mxfp4, got none", scale=None),
    bad("linear mxfp4", "scale: expected uint8 in format mxfp4, got bfloat16", scale=Tensor.bfloat16),
    bad("linear mxfp4", "scale: expected shape [N, H / 32] with N = 33, H = 160, got [33, 4]", scale=cut),
    bad("linear mxfp4", "scale: expected shape [N, H / 32] with N = 33, H = 160, got [33, 10]",
        scale=lambda t: t.repeat_interleave(2, -1)),
    bad("linear mxfp4", "offset: expected none with format mxfp4, got a tensor", offset=torch.ones(1)),
    bad("linear mxfp4", "group_size: expected 0 or 32 with format mxfp4, got 64", group_size=64),
    bad("linear mxfp4", "weight: expected H to be a multiple of 32 in format mxfp4, got 144", x=lambda t: t[:, 16:],
        weight=lambda t: t[:, 8:]),
    bad("experts mxfp4", "down: expected shape [E, H, I / 2] with E = 7, H = 160, I = 96, got [7, 160, 47]", down=cut),
    bad("experts mxfp4", "down_scale: expected shape [E, H, I / 32] with E = 7, H = 160, I = 96, got [7, 160, 2]",
        down_scale=cut),
    bad("experts mxfp4", "gate_up_offset: expected none with format mxfp4, got a tensor",
        gate_up_offset=torch.ones(1)),
    bad("dequantize mxfp4", "weight: expected shape [*, N, C / 32, 16], got [16]", weight=lambda t: t[0, :16],
        scale=torch.tensor(1, dtype=torch.uint8)),
    bad("linear fp8", "weight: expected shape [N, H] with N = 200, H = 130, got [200, 129]", weight=cut),
    bad("linear fp8", "weight: expected float8_e4m3fn or uint8 in format fp8, got int32", weight=Tensor.int),
    bad("linear fp8", "weight: expected float8_e4m3fn or uint8 in format fp8, got float8_e5m2",
        weight=lambda t: t.view(torch.float8_e5m2)),
    bad("linear fp8", "scale: expected a tensor with format fp8, got none", scale=None),
    bad("linear fp8", "scale: expected float32 or bfloat16 in format fp8, got float16", scale=Tensor.half),
    bad("linear fp8", "scale: expected shape [2, 2], a scale for each 128 x 128 block of weight; got [2, 1]",
        scale=cut),
    bad("linear fp8", "offset: expected none with format fp8, got a tensor", offset=torch.ones(1)),
    bad("linear fp8", "group_size: expected 0 or 128 with format fp8, got 32", group_size=32),
    bad("experts fp8", "down_scale: expected shape [7, 2, 1], a scale for each 128 x 128 block of down; got [7, 1, 1]",
        down_scale=lambda t: t[:, 1:]),
    bad("linear nvfp4", "scale: expected a tensor with format nvfp4, got none", scale=None),
    bad("linear nvfp4", "scale: expected float8_e4m3fn or uint8 in format nvfp4, got float32", scale=Tensor.float),
    bad("linear nvfp4", "scale: expected shape [N, H / 16] with N = 35, H = 112, got [35, 6]", scale=cut),
    bad("linear nvfp4", "offset: expected float32 in format nvfp4, got float16", offset=Tensor.half),
    bad("linear nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got [2]",
        offset=lambda t: t.expand(2)),
    bad("linear nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got []",
        offset=lambda t: t[0]),
    bad("linear nvfp4", "group_size: expected 0 or 16 with format nvfp4, got 32", group_size=32),
    bad("linear nvfp4", "weight: expected H to be a multiple of 16 in format nvfp4, got 104", x=lambda t: t[:, 8:],
        weight=lambda t: t[:, 4:]),
    bad("experts nvfp4", "gate_up_offset: expected shape [7, 1], a factor for each matrix of gate_up; got [7]",
        gate_up_offset=lambda t: t[:, 0]),
    bad("experts nvfp4", "down_offset: expected shape [7, 1], a factor for each matrix of down; got [6, 1]",
        down_offset=lambda t: t[1:]),
    bad("dequantize nvfp4", "offset: expected shape [1], a factor for each matrix of weight; got [35, 1]",
        offset=lambda t: t.expand(35, 1)),
    bad("linear q4_k", FORMATS + "'iq2_xs'", format="iq2_xs"),
    bad("linear q4_k", "scale: expected none with format q4_k, got a tensor", scale=torch.ones(1)),
    bad("linear q4_k", "offset: expected none with format q4_k, got a tensor", offset=torch.ones(1)),
    bad("linear q4_k", "scale: expected a tensor with format mxfp8, got none", format="mxfp8",
        weight=lambda t: t.repeat(1, 2)[:, :256]),
    bad("linear q4_k", "weight: expected shape [N, H / 256 * 144] with N = 34, H = 256, got [34, 143]", weight=cut),
    bad("linear q4_k", "weight: expected uint8 in format q4_k, got int32", weight=lambda t: t.view(torch.int32)),
    bad("linear q4_k", "weight: expected H to be a multiple of 256 in format q4_k, got 128", x=lambda t: t[:, 128:],
        weight=lambda t: t[:, 72:]),
    bad("linear q4_k", "weight: " + ONE_RUN + "[288, 2]", weight=every_second),
    bad("linear q4_k", "group_size: expected 0 or 32 with format q4_k, got 64", group_size=64),
    bad("experts q4_k", "down_" + FORMATS + "'iq2_xs'", down_format="iq2_xs"),
    bad("experts q4_k", "down: expected shape [E, H, I / 256 * 144] with E = 7, H = 256, I = 256, got [7, 256, 210]",
        down_format=None),
    bad("experts q4_k", "down_scale: expected none with format q6_k, got a tensor", down_scale=torch.ones(1)),
    bad("experts q4_k", "group_size: expected 0 or 16 with format q6_k, got 32", group_size=32),
    bad("experts q4_k", "transposed: expected False with format q6_k, got True", transposed=True, format="dense",
        gate_up=torch.ones(7, 256, 512, dtype=BFLOAT)),
    bad("dequantize q4_k", "weight: expected shape [*, N, C / 256 * 144] with * = [], N = 34, C = 254, got [34, 143]",
        weight=cut),
]  # fmt: skip

SHARED_MEMORY = (
    "residual: expected a tensor whose elements have memory of their own, got one in which some share theirs; pass "
    "residual.clone()"
)
for _op in IN_PLACE:
    BAD += [
        bad(_op, "residual: expected float32, float16 or bfloat16, got float64", residual=Tensor.double),
        bad(_op, "residual: expected shape [*, H], got []", residual=torch.tensor(1.0)),
        bad(_op, "slots: expected shape [*, K, H] with * = [6], K = 3, H = 67, got [6, 3, 66]", slots=cut),
        bad(_op, "slots: expected float32, the dtype of residual; got float16", slots=Tensor.half),
        bad(_op, "weights: expected shape [*, K] with * = [6], K = 3, got [6, 2]", weights=cut),
        bad(_op, SHARED_MEMORY, residual=lambda t: t[:1].expand(6, 67)),
        bad(_op, SHARED_MEMORY, residual=lambda t: t.as_strided((6, 67), (1, 1))),
        bad(_op, SHARED_MEMORY, residual=lambda t: t.as_strided((6, 67), (2, 3))),
    ]  # fmt: skip
BAD.append(bad("weighted_sum_residual_norm_", "norm_weight: expected shape [H] with H = 67, got [66]", norm_weight=cut))
BAD.append(bad("weighted_sum_residual_norm_", "eps: expected a finite number >= 0, got -1", eps=-1.0))
for _op in ("norm_add", "residual_norm"):
    BAD += [
        bad(_op, "residual: expected float32, float16 or bfloat16, got float64", residual=Tensor.double),
        bad(_op, "residual: expected H >= 1, got 0", residual=no_columns),
        bad(_op, "input: expected shape [*, H] with * = [6], H = 67, got [6, 66]", input=cut),
        bad(_op, "input: expected float32, the dtype of residual; got bfloat16", input=Tensor.bfloat16),
        bad(_op, "weight: expected shape [H] with H = 67, got [66]", weight=cut),
        bad(_op, "scalar: expected shape [H] with H = 67, got [2]", scalar=lambda t: t.repeat(2)),
        bad(_op, "scalar: expected shape [H] with H = 67, got []", scalar=torch.tensor(1.0)),
        bad(_op, "scalar: expected float32, the dtype of residual; got float16", scalar=Tensor.half),
        bad(_op, "eps: expected a finite number >= 0, got -0.001", eps=-0.001),
        bad(_op, "eps: expected a finite number >= 0, got 1e+39, which is inf as float32", eps=1e39),
    ]


def with_changes(case: Case, device: str, changes: dict) -> tuple[Args, dict]:
    args, options = case.arguments(device), dict(case.options)
    for name, change in changes.items():
        if name not in ARGUMENTS[case.op]:
            options[name] = change
        elif callable(change):
            args[name] = change(args[name])
        else:
            args[name] = None if change is None else change.to(device)
    return args, options


def refusal(op: str, args: Args, options: dict) -> str:
    """The message of the op's error. Also checks that nothing was written."""
    tensors = {name: value for name, value in args.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError) as error:
        call(getattr(torch.ops.moe_metal, op), op, args, options)
    for name, tensor in tensors.items():
        assert torch.equal(bits(tensor), before[name]), f"{name} has changed"
    return str(error.value)


def check_refusal(good: str, device: str, message: str, changes: dict) -> None:
    op = GOOD[good].op
    args, options = with_changes(GOOD[good], device, changes)
    assert refusal(op, args, options) == f"moe_metal::{op}: {message}"


@pytest.mark.parametrize("good, message, changes", BAD)
def test_bad_input(good: str, message: str, changes: dict):
    """On meta, as used by torch.compile and torch.export, errors have the same messages as on the CPU."""
    check_refusal(good, "cpu", message, changes)
    check_refusal(good, "meta", message, changes)


ONE_WRONG_SHAPE = {bad.values[0]: bad for bad in reversed(BAD) if "expected shape" in bad.values[1]}


@pytest.mark.parametrize("good, message, changes", ONE_WRONG_SHAPE.values())
def test_bad_input_on_mps(good: str, mps: str, message: str, changes: dict):
    """The checks are shared with the CPU; this tests that each op on mps calls them."""
    check_refusal(good, mps, message, changes)


@EACH
def test_freed_memory(case: Case):
    """FSDP frees the storage of tensors: this must raise before anything is read or written. PyTorch cannot do it on
    mps, where the check is the same."""
    for name in case.shapes:
        for left in (0, 1):  # an empty storage, and one that is a byte too short
            args = case.arguments()
            args[name] = args[name].clone()
            size = args[name].nbytes
            args[name].untyped_storage().resize_((size - 1) * left)
            with pytest.raises(RuntimeError) as error:
                run(case, args)
            assert str(error.value).splitlines()[0] == (
                f"moe_metal::{case.op}: {name}: expected a tensor of {size} bytes of memory, got one of "
                f"{(size - 1) * left}: its storage was freed or cut"
            )


@EACH
def test_meta_tensors_need_no_memory(case: Case):
    want = run(case, case.arguments("meta"))
    args = case.arguments("meta")
    for tensor in args.values():
        tensor.untyped_storage().resize_(0)
    assert [tensor.shape for tensor in run(case, args)] == [tensor.shape for tensor in want]


def test_inner_size_whose_double_overflows():
    args = ODD["experts"].arguments()
    args |= {"x": args["x"][:, :1], "down": args["down"][:1, :1, :1].expand(1, 1, 2**62)}
    said = "moe_metal::experts: down: expected 1 to 4611686018427387903 (its inner size, I), got 4611686018427387904"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        run(ODD["experts"], args)


@pytest.mark.parametrize("op", [op for op, case in ODD.items() if len(case.shapes) > 1])
def test_shapes_are_checked_before_anything_is_copied(op: str, device: str):
    """A copy with so many columns would exhaust memory, and its error would hide the real one."""
    args, shapes = ODD[op].arguments(device), ODD[op].shapes
    for name in args:
        last, others = shapes[name][-1:], "".join(shapes[other] for other in args if other != name)
        if last not in others:
            continue  # a value of attention may have any size
        wide = args[name][..., :1].expand(*args[name].shape[:-1], 2**40)
        with pytest.raises(RuntimeError) as error:
            run(ODD[op], args | {name: wide})
        assert re.match(rf"moe_metal::{op}: \w+: expected shape", str(error.value)), name


@EACH
def test_none_for_a_tensor(case: Case, device: str):
    args = case.arguments(device)
    for name in args:
        if not ARGUMENTS[case.op][name].optional:
            assert refusal(case.op, args | {name: None}, case.options) == (
                f"moe_metal::{case.op}: {name}: expected a tensor, got None"
            )


@pytest.mark.parametrize("op", ODD)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
def test_none_for_every_tensor(op: str, mode: Callable):
    """Without tensors there is no device."""
    first = next(iter(ARGUMENTS[op]))
    with mode():
        said = refusal(op, dict.fromkeys(ARGUMENTS[op]), ODD[op].options)
    assert said == f"moe_metal::{op}: {first}: expected a tensor, got None"


@pytest.mark.parametrize("good, message, changes", ONE_WRONG_SHAPE.values())
def test_bad_input_compiled(good: str, message: str, changes: dict):
    """Errors are raised while compiling, with symbolic sizes."""
    case = GOOD[good]
    args, options = with_changes(case, "cpu", changes)
    for name, letters in case.shapes.items():
        if "T" in letters and args[name] is not None and args[name].dim() == len(letters):
            torch._dynamo.maybe_mark_dynamic(args[name], letters.index("T"))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(f"moe_metal::{case.op}: {message}")):
        torch.compile(lambda args: run(replace(case, options=options), args), fullgraph=True, backend="eager")(args)


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_target_overlaps_an_input(op: str, device: str):
    args = ODD[op].arguments(device)
    memory = torch.randn(6 * 3 * 67, device=device)
    args["slots"], args["residual"] = memory.view(6, 3, 67), memory[: 6 * 67].view(6, 67)
    assert refusal(op, args, {}) == (
        f"moe_metal::{op}: residual: expected memory that no other argument uses, got a tensor that overlaps one"
    )


@EACH
def test_tensors_of_two_devices(case: Case, mps: str):
    """One tensor on the CPU, or only one on mps: no silent copy, no wrong pointer in a kernel."""
    op = case.op
    first, *rest = case.shapes
    for name in rest:
        for here, there in (("mps:0", "cpu"), ("cpu", "mps:0")):
            args = case.arguments(here)
            args[name] = args[name].to(there)
            assert refusal(op, args, case.options) == (
                f"moe_metal::{op}: {name}: expected device {here}, the device of {first}; got {there}"
            )


@EACH
def test_one_tensor_on_meta(case: Case):
    """Devices must be equal even if only shapes matter."""
    first, *rest = case.shapes
    for name in rest:
        for here, there in (("meta", "cpu"), ("cpu", "meta")):
            args = case.arguments(here)
            args[name] = torch.empty_like(args[name], device=there)
            with pytest.raises(RuntimeError) as error:
                run(case, args)
            assert str(error.value).splitlines()[0] == (
                f"moe_metal::{case.op}: {name}: expected device {here}, the device of {first}; got {there}"
            )


@pytest.mark.parametrize("format", ["affine", "mxfp4", "fp8", "nvfp4", "q4_k"])
def test_strides_of_an_empty_weight_do_not_matter(format: str, device: str):
    case = PACKED[{"affine": "dequantize affine4"}.get(format, f"dequantize {format}")]
    args = {name: tensor[:0] if name != "offset" or format == "affine" else tensor
            for name, tensor in case.arguments(device).items()}  # fmt: skip
    want = run(case, args)
    args["weight"] = torch.empty_strided(args["weight"].shape, (0, 0), dtype=args["weight"].dtype, device=device)
    assert all(a.shape == b.shape for a, b in zip(run(case, args), want, strict=True))


def test_row_count_near_overflow():
    """2^63 - 1 rows with one element each; only the shape of their scales is wrong."""
    rows = torch.zeros(1, 1, dtype=torch.uint8).expand(2**63 - 1, 1)
    with pytest.raises(RuntimeError, match=r"scale: expected shape \[72057594037927936, 1\], a scale for each 128 x"):
        torch.ops.moe_metal.linear(torch.ones(1, 1), rows, torch.ones(1, 1), format="fp8")


@EACH
def test_sparse_tensors(case: Case):
    for name in case.shapes:
        args = case.arguments()
        args[name] = args[name].to_sparse()
        with pytest.raises(NotImplementedError) as error:
            run(case, args)
        assert str(error.value) == (
            f"moe_metal::{case.op}: {name}: expected a dense tensor on cpu or mps, got one of SparseCPU"
        )
