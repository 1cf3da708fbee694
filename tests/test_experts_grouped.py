"""experts on mps when products for prompts are PyTorch's own, which torch 2.15 has for mps."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, FLOAT, HALF, Args, Case, call, expected
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from packings import MXFP4
from torch_moe_metal import gpu_settings
from torch_moe_metal.warmup import MPS

pytestmark = pytest.mark.skipif("mps" not in DEVICES, reason="MOE_METAL_DEVICES leaves mps out, which alone has it")
recorded = pytest.mark.skipif(not SIMULATED, reason="the simulated Metal records dispatches; a Mac's own does not")

#: The gate and up products, the inner activations, each expert's result and the sum are rounded. These errors are
#: independent, so the four together are twice as large as one.
ROUNDINGS = 2
DIMS = {"T": 40, "E": 6, "K": 3, "H": 72, "I": 40}
BIASES = ("gate_up_bias", "down_bias")
ADDED = ("shared", "shared_gate", "residual")
GPT_OSS = {"transposed": True, "interleaved": True, "activation": "swiglu_oai", "limit": 7.0, "alpha": 1.702}


@contextlib.contextmanager
def grouped(**numbers: int) -> Iterator[None]:
    """Makes PyTorch's products available. On a Mac they exist from torch 2.15 on."""
    import metal_sim

    with metal_sim.grouped_mm() if SIMULATED else contextlib.nullcontext():
        gpu_settings.use({"matrix_units": 1} | numbers)
        try:
            yield
        finally:
            gpu_settings.use({})


def kernels(dtype: str, times: int = 1) -> list[str]:
    names = ["sort", "grouped_x", f"grouped_inner_{dtype}", f"grouped_combine_{dtype}"]
    return times * [f"experts_{name}" for name in names]


def case(*given: str, dtype: torch.dtype = BFLOAT, dims: dict | None = None, **options) -> Case:
    return Case("experts", "grouped", DIMS | (dims or {}), given, options, dtype)


def arguments(case: Case, device: str = "cpu") -> Args:
    """The second expert has no slot, and some ids are out of range."""
    args = case.arguments()
    ids, E = args["ids"].long(), case.dims["E"]
    ids[ids == 1] = -1
    ids[::7, 0], ids[3, -1], ids[5, -1] = E, 1 << 40, -(1 << 40)
    return {name: tensor.to(device) for name, tensor in (args | {"ids": ids}).items()}


def run(args: Args, options: dict) -> tuple[list[Tensor], list[str]]:
    """Returns the results and the kernels that ran. The host must not wait for the device."""
    if not SIMULATED:
        return call(torch.ops.moe_metal.experts, "experts", args, options), []
    import metal_sim

    with metal_sim.record() as record:
        got = call(torch.ops.moe_metal.experts, "experts", args, options)
    assert not record.host_syncs
    return got, record.kernels


def check(case: Case, args: Args, want: list[str] | None = None, roundings: float = ROUNDINGS) -> None:
    got, ran = run(args, case.options)
    assert want is None or not SIMULATED or ran == want
    assert_matches(got, expected("experts", arguments(case), case.options), case.longest_sum, roundings=roundings)


# ------------------------------------------------------------------------------------------------ right answers

CASES = {
    "plain": case(),
    "biases": case(*BIASES, *ADDED),
    "gpt_oss": case(*BIASES, **GPT_OSS),
    "half": case(*BIASES, *ADDED, dtype=HALF, interleaved=True),
    "transposed": case(dtype=HALF, transposed=True),
    "short_ids": case("down_bias"),
    "one_expert": case(*BIASES, dims={"E": 1, "K": 1, "H": 8, "I": 8}),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_pytorch(mps: str, name: str):
    case = CASES[name]
    args = arguments(case, mps)
    if name == "short_ids":
        args["ids"] = args["ids"].clamp(-1, 6).int()
    dtype = "half" if case.dtype == HALF else "bfloat"
    with grouped():
        check(case, args, kernels(dtype))


@pytest.mark.parametrize("gap", [0, 8])
def test_separate_gate_and_up(mps: str, gap: int):
    """[E, 2, I, H]: one matrix if there is nothing between the two, as PyTorch's op requires."""
    plain = case("gate_up_bias")
    args = arguments(plain, mps)
    E, I, H = (DIMS[letter] for letter in "EIH")
    memory = torch.full((E, 2, I + gap, H), torch.nan, dtype=BFLOAT, device=mps)
    apart = memory[:, :, :I]
    args["gate_up"] = apart.copy_(args["gate_up"].view(E, 2, I, H))
    with grouped():
        got, ran = run(args, {})
    assert not SIMULATED or (ran == kernels("bfloat")) == (gap == 0)
    assert_matches(got, expected("experts", arguments(plain), {}), plain.longest_sum, roundings=ROUNDINGS)


def test_no_slot_of_any_expert(mps: str):
    """All rows of PyTorch's product are then undefined, and none may reach the output."""
    everything = case(*BIASES, *ADDED)
    args = arguments(everything)
    args["ids"] = torch.full_like(args["ids"], -1)
    with grouped():
        got, _ = run({name: tensor.to(mps) for name, tensor in args.items()}, {})
    assert_matches(got, expected("experts", args, {}))


@recorded
def test_any_grid_and_order_of_threads(mps: str):
    import metal_sim

    gpt_oss = CASES["gpt_oss"]
    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        with grouped(), metal_sim.more_threadgroups(3), metal_sim.concurrent_encoders():
            check(gpt_oss, arguments(gpt_oss, mps))
    finally:
        metal_sim.set_orders("forward")


@recorded
def test_a_long_prompt_in_pieces(mps: str):
    everything = case(*BIASES, *ADDED)
    with grouped(dispatch_mflops=1):
        check(everything, arguments(everything, mps), kernels("bfloat", times=2))


def test_autocast_does_not_matter(mps: str):
    """Autocast must not apply to PyTorch's op, which would convert."""
    plain = case()
    args = arguments(plain, mps)
    with grouped():
        want, _ = run(args, {})
        with torch.autocast("mps", dtype=HALF):
            got, _ = run(args, {})
    assert torch.equal(got[0], want[0])


@recorded
def test_warm_up_computes_nothing(mps: str):
    """On meta, without PyTorch's product."""
    import metal_sim

    on_meta = {name: tensor.to("meta") for name, tensor in arguments(case()).items()}
    with grouped(), metal_sim.record() as record:
        got = torch.ops.moe_metal.experts.default.redispatch(MPS, **on_meta)
    assert not record.dispatches and got.shape == (DIMS["T"], DIMS["H"]) and got.is_meta


# ------------------------------------------------------------------------------------------------ and where it is not


def late(tensor: Tensor) -> Tensor:
    """At an address that is no multiple of 16 bytes."""
    return torch.empty(tensor.numel() + 4, dtype=tensor.dtype, device=tensor.device)[4:].view_as(tensor).copy_(tensor)


def in_wider_rows(tensor: Tensor) -> Tensor:
    """Rows that do not begin at multiples of 16 bytes."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 4, dtype=tensor.dtype, device=tensor.device)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def overlapping(tensor: Tensor) -> Tensor:
    """Each row begins 8 elements after the previous one."""
    _, rows, columns = tensor.shape
    return tensor.as_strided(tensor.shape, (rows * columns, 8, 1))


REFUSED = {
    "float32": (case(dtype=FLOAT), {}),
    "odd_H": (case(dims={"H": 60}), {}),
    "odd_I": (case(dims={"I": 36}), {}),
    "late_x": (case(), {"x": late}),
    "late_weight": (case(), {"down": late}),
    "wider_rows": (case(), {"gate_up": in_wider_rows}),
    "overlapping": (case(), {"down": overlapping}),
}


@recorded
@pytest.mark.parametrize("name", REFUSED)
def test_our_kernels_run_if_pytorchs_op_would_raise(mps: str, name: str):
    case, views = REFUSED[name]
    args = arguments(case)
    want_of = {n: views[n](t) if n in views else t for n, t in args.items()}
    on_device = {n: views[n](t.to(mps)) if n in views else t.to(mps) for n, t in args.items()}
    with grouped():
        got, ran = run(on_device, {})
    assert "experts_grouped_x" not in ran and any("tiles" in kernel for kernel in ran)
    assert_matches(got, expected("experts", want_of, {}), case.longest_sum)


@recorded
def test_our_kernels_run_for_packed_weights(mps: str):
    import metal_sim
    from test_experts_mps import check, packed_experts

    with grouped(), metal_sim.record() as record:
        check("experts", *packed_experts(MXFP4, 40, BFLOAT), mps)
    assert not any("grouped" in kernel for kernel in record.kernels)


@recorded
@pytest.mark.parametrize("least, taken", [(0, False), (20, True), (21, False)])
def test_threshold_of_slots_per_expert(mps: str, least: int, taken: bool):
    """40 tokens with 3 slots, of 6 experts: 20 each."""
    plain = case()
    with grouped(matrix_units=least):
        _, ran = run(arguments(plain, mps), {})
    assert (ran == kernels("bfloat")) == taken


@recorded
def test_an_older_torch_has_no_such_product(mps: str):
    """Its kernel for all devices would have the host wait for every expert."""
    plain = case()
    gpu_settings.use({"matrix_units": 1})
    try:
        got, ran = run(arguments(plain, mps), {})
    finally:
        gpu_settings.use({})
    assert any("tiles" in kernel for kernel in ran)
    assert_matches(got, expected("experts", arguments(plain), {}), plain.longest_sum)
