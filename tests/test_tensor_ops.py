"""experts and linear on mps where kernels of our own use the matrix units (shaders/tensor_ops.metal).

They have never run on a Mac. Here Apple's matmul2d is the simulated Metal's, which refuses what Apple leaves undefined.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import BFLOAT, FLOAT, HALF, Args, Case, call, expected
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from packings import AFFINE, FP8, MXFP4, Packing
from simulated import lines_of
from test_experts_mps import in_float64, kernels_of, packed_linear
from torch_moe_metal import gpu_settings
from torch_moe_metal.random_weights import FORMATS
from torch_moe_metal.warmup import MPS

pytestmark = [
    pytest.mark.skipif("mps" not in DEVICES, reason="MOE_METAL_DEVICES leaves mps out, which alone has it"),
    pytest.mark.skipif(not SIMULATED, reason="a Mac may have no matmul2d, and records no dispatches"),
]

#: The gate and up products, the inner activations, each expert's result, the sum and packed weights are rounded. These
#: errors are independent, so all together are about twice as large as one.
ROUNDINGS = 2
OTHERS = [packing for name, packing in FORMATS.items() if packing and packing not in (AFFINE[4], MXFP4, FP8)]
EVERY_FORMAT = [AFFINE[4], MXFP4, *(pytest.param(packing, marks=pytest.mark.slow) for packing in (FP8, *OTHERS))]


@contextlib.contextmanager
def units(minor: int = 3, **numbers: int) -> Iterator[None]:
    """On macOS 26.3, and from one slot or token per weight on."""
    import metal_sim

    with metal_sim.playing_macos(26, minor):
        gpu_settings.use({"tensor_ops": 1} | numbers)
        try:
            yield
        finally:
            gpu_settings.use({})


def experts_kernels(rows: int, dtype: str, times: int = 1) -> list[str]:
    """What runs with tiles of so many rows; `dtype`: of the products, with the format before it."""
    of_rows, plain = f"tensor_products{rows}_{dtype}", dtype.rpartition("_")[2]
    names = ["sort", "gather", of_rows, f"activate_{plain}", of_rows, f"combine_sorted_{plain}"]
    return times * names


def kernels(run: Callable[[], object]) -> list[str]:
    """What `run` dispatches, without the op's name. Where test_mutated_readers.py replays the op, the host waits."""
    import metal_sim

    with metal_sim.record() as record:
        run()
    return [name.removeprefix("experts_") for name in record.kernels]


def check_linear(args: Args, options: dict, mps: str, want: list[str]) -> None:
    got = []
    on_device = {name: tensor.to(mps) for name, tensor in args.items() if tensor is not None}
    assert kernels(lambda: got.append(torch.ops.moe_metal.linear(**on_device, **options))) == want
    assert_matches(got, [in_float64("linear", args, options)], roundings=ROUNDINGS)


# ------------------------------------------------------------------------------------------------ experts

DIMS = {"T": 40, "E": 6, "K": 3, "H": 72, "I": 40}
BIASES = ("gate_up_bias", "down_bias")
ADDED = ("shared", "shared_gate", "residual")
GPT_OSS = {"interleaved": True, "activation": "swiglu_oai", "limit": 7.0, "alpha": 1.702}


def dense(*given: str, dtype: torch.dtype = BFLOAT, dims: dict | None = None, **options) -> Case:
    return Case("experts", "units", DIMS | (dims or {}), given, options, dtype)


def arguments(case: Case, device: str = "cpu") -> Args:
    """The second expert has no slot, and some ids are out of range."""
    args = case.arguments()
    ids, E = args["ids"].long(), case.dims["E"]
    ids[ids == 1] = -1
    ids[::7, 0], ids[3, -1], ids[5, -1] = E, 1 << 40, -(1 << 40)
    return {name: tensor.to(device) for name, tensor in (args | {"ids": ids}).items()}


CASES = {
    "plain": dense(),
    "biases": dense(*BIASES, *ADDED),
    "gpt_oss": dense(*BIASES, **GPT_OSS),
    "half": dense(*BIASES, *ADDED, dtype=HALF, interleaved=True),
    "short_ids": dense("down_bias"),
    "one_expert": dense(*BIASES, dims={"E": 1, "K": 1, "H": 8, "I": 8}),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_experts(mps: str, name: str):
    args = arguments(CASES[name], mps)
    if name == "short_ids":
        args["ids"] = args["ids"].clamp(-1, 6).int()
    check_experts(CASES[name], args)


def check_experts(case: Case, args: Args, times: int = 1, **numbers: int) -> None:
    slots = case.dims["T"] // times * case.dims["K"] // case.dims["E"]
    rows = 16 if slots < 12 else 32 if slots < 49 else 64
    with units(**numbers):
        got = []
        ran = kernels(lambda: got.extend(call(torch.ops.moe_metal.experts, "experts", args, case.options)))
    assert ran == experts_kernels(rows, "half" if case.dtype == HALF else "bfloat", times)
    want = expected("experts", arguments(case), case.options)
    assert_matches(got, want, case.longest_sum, roundings=ROUNDINGS)


def test_a_long_prompt_in_parts(mps: str):
    case = CASES["biases"]
    check_experts(case, arguments(case, mps), times=2, dispatch_mflops=1)


@pytest.mark.parametrize("gap", [0, 8])
def test_separate_gate_and_up(mps: str, gap: int):
    """[E, 2, I, H]: one matrix if there is nothing between the two, as matmul2d requires."""
    case = dense("gate_up_bias")
    args = arguments(case, mps)
    E, I, H = (DIMS[letter] for letter in "EIH")
    memory = torch.full((E, 2, I + gap, H), torch.nan, dtype=BFLOAT, device=mps)
    apart = memory[:, :, :I]
    args["gate_up"] = apart.copy_(args["gate_up"].view(E, 2, I, H))
    got = []
    with units():
        ran = kernels(lambda: got.extend(call(torch.ops.moe_metal.experts, "experts", args, {})))
    assert (ran == experts_kernels(32, "bfloat")) == (gap == 0)
    assert_matches(got, expected("experts", arguments(case), {}), case.longest_sum, roundings=ROUNDINGS)


@pytest.mark.parametrize("T", [12, 110])
def test_small_and_large_tiles(mps: str, T: int):
    """Of 16 and 64 rows, one of which spans two tiles for its expert; rows of weights that end inside a tile."""
    case = dense("gate_up_bias", dims={"T": T, "H": 136})
    check_experts(case, arguments(case, mps))


def packed_experts(packing: Packing, T: int, dtype: torch.dtype) -> tuple[Args, dict]:
    """Two experts, and ids of none. gate and up are apart in every other format."""
    H, I = (256, 256) if packing.row.whole_columns > 128 else (192, 128)
    E, K, generator = 2, 2, torch.Generator().manual_seed(T)
    args = {}
    for name, size in {"gate_up": (E, 2 * I, H), "down": (E, H, I)}.items():
        parts = packing.weight(*size, generator=generator)
        args |= {n: t for n, t in zip((name, f"{name}_scale", f"{name}_offset"), parts, strict=True) if t is not None}
    args["x"] = torch.randn(T, H, generator=generator).to(dtype)
    args["weights"] = torch.rand(T, K, generator=generator)
    args["ids"] = torch.randint(0, E + 1, (T, K), generator=generator)
    return args, {"format": packing.format}


@pytest.mark.parametrize("packing", EVERY_FORMAT, ids=str)
def test_packed_experts(mps: str, packing: Packing):
    args, options = packed_experts(packing, 17, BFLOAT)
    library = next(name for name, other in FORMATS.items() if other == packing)
    got = []
    with units():
        on_device = {name: tensor.to(mps) for name, tensor in args.items()}
        ran = kernels(lambda: got.append(torch.ops.moe_metal.experts(**on_device, **options)))
    assert ran == experts_kernels(32, f"{library}_bfloat")
    assert_matches(got, [in_float64("experts", args, options)], roundings=ROUNDINGS)


def test_the_host_does_not_wait(mps: str):
    args, options = packed_experts(AFFINE[4], 17, BFLOAT)
    on_device = {name: tensor.to(mps) for name, tensor in args.items()}
    with units():
        assert kernels_of(lambda: torch.ops.moe_metal.experts(**on_device, **options))


def test_no_slot_of_any_expert(mps: str):
    """No tile has rows then. All rows of the products are then undefined, and none may reach the output."""
    args = arguments(CASES["biases"])
    args["ids"] = torch.full_like(args["ids"], -1)
    with units():
        got = call(torch.ops.moe_metal.experts, "experts", {n: t.to(mps) for n, t in args.items()}, {})
    assert_matches(got, expected("experts", args, {}))


def test_any_grid_and_order_of_threads(mps: str):
    import metal_sim

    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        with metal_sim.more_threadgroups(3), metal_sim.concurrent_encoders():
            check_experts(CASES["biases"], arguments(CASES["biases"], mps), tiles_per_band=3)
            with units():
                args, options = packed_linear(AFFINE[4], 40, BFLOAT, H=128)
                check_linear(args, options, mps, ["tensor_products32_affine4_bfloat"])
    finally:
        metal_sim.set_orders("forward")


# ------------------------------------------------------------------------------------------------ linear


@pytest.mark.parametrize("T, rows", [(9, 16), (40, 32), (130, 64)])
@pytest.mark.parametrize("dtype", [BFLOAT, pytest.param(HALF, marks=pytest.mark.slow)], ids=str)
def test_dense_linear(mps: str, T: int, rows: int, dtype: torch.dtype):
    case = Case("linear", "units", {"T": T, "N": 71, "H": 72}, ("bias",), {}, dtype)
    with units():
        check_linear(case.arguments(), {}, mps, [f"tensor_products{rows}_{'half' if dtype == HALF else 'bfloat'}"])


@pytest.mark.parametrize("packing", EVERY_FORMAT, ids=str)
def test_packed_linear_on_units(mps: str, packing: Packing):
    """71 rows of weights, and a bias in float32."""
    args, options = packed_linear(packing, 33, BFLOAT, H=256)
    library = next(name for name, other in FORMATS.items() if other == packing)
    with units():
        check_linear(args, options, mps, [f"tensor_products32_{library}_bfloat"])


def test_packed_linear_in_half(mps: str):
    args, options = packed_linear(MXFP4, 9, HALF, H=192)
    with units():
        check_linear(args, options, mps, ["tensor_products16_mxfp4_half"])


def test_nan_stays_in_its_row(mps: str):
    """fp8's NaN makes the outputs of its row of weights NaN, and no other."""
    args, options = packed_linear(FP8, 20, BFLOAT, H=128)
    args["weight"][5, 77] = 0x7F
    with units():
        got = torch.ops.moe_metal.linear(**{n: t.to(mps) for n, t in args.items() if t is not None}, **options).cpu()
    assert got[:, 5].isnan().all() and got.isnan().sum() == 20


# ------------------------------------------------------------------------------------------------ and where they do not


def linear_kernels(mps: str, args: Args, options: dict) -> list[str]:
    on_device = {name: tensor.to(mps) for name, tensor in args.items() if tensor is not None}
    return kernels_of(lambda: torch.ops.moe_metal.linear(**on_device, **options))


REFUSED_LINEAR = {
    "float32": packed_linear(AFFINE[4], 20, FLOAT, H=128),
    "columns": packed_linear(MXFP4, 20, BFLOAT, H=224),
    "odd_dense": (Case("linear", "odd", {"T": 20, "N": 8, "H": 76}, dtype=BFLOAT).arguments(), {}),
}


@pytest.mark.parametrize("name", REFUSED_LINEAR)
def test_other_kernels_run_where_rows_do_not_fit(mps: str, name: str):
    with units():
        (kernel,) = linear_kernels(mps, *REFUSED_LINEAR[name])
    assert kernel.startswith("linear_tiles")


def late(tensor: Tensor) -> Tensor:
    """At an address that is no multiple of 16 bytes."""
    return torch.empty(tensor.numel() + 4, dtype=tensor.dtype, device=tensor.device)[4:].view_as(tensor).copy_(tensor)


def in_wider_rows(tensor: Tensor) -> Tensor:
    """Rows that do not begin at multiples of 16 bytes."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 4, dtype=tensor.dtype, device=tensor.device)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


REFUSED_EXPERTS = {
    "float32": (dense(dtype=FLOAT), {}),
    "transposed": (dense(dtype=HALF, transposed=True), {}),
    "odd_H": (dense(dims={"H": 60}), {}),
    "odd_I": (dense(dims={"I": 36}), {}),
    "late_x": (dense(), {"x": late}),
    "late_weight": (dense(), {"down": late}),
    "wider_rows": (dense(), {"gate_up": in_wider_rows}),
}


@pytest.mark.parametrize("name", REFUSED_EXPERTS)
def test_other_kernels_run_where_experts_do_not_fit(mps: str, name: str):
    case, views = REFUSED_EXPERTS[name]
    args, got = arguments(case, mps), []
    args |= {name: view(args[name]) for name, view in views.items()}
    with units():
        ran = kernels(lambda: got.extend(call(torch.ops.moe_metal.experts, "experts", args, case.options)))
    assert any("_tiles" in kernel for kernel in ran) and not any("tensor" in kernel for kernel in ran)
    assert_matches(got, expected("experts", arguments(case), case.options), case.longest_sum)


@pytest.mark.parametrize("minor, taken", [(2, False), (3, True)])
def test_macos_26_3_is_needed(mps: str, minor: int, taken: bool):
    args, options = packed_linear(MXFP4, 20, BFLOAT, H=128)
    with units(minor):
        (kernel,) = linear_kernels(mps, args, options)
    assert kernel.startswith("tensor_products") == taken


@pytest.mark.parametrize("least, taken", [(0, False), (20, True), (21, False)])
def test_threshold_of_slots_per_expert(mps: str, least: int, taken: bool):
    """40 tokens with 3 slots, of 6 experts: 20 each. And 20 tokens of a linear layer."""
    args = arguments(dense(), mps)
    with units(tensor_ops=least):
        of_experts = kernels_of(lambda: torch.ops.moe_metal.experts(**args))
        (of_linear,) = linear_kernels(mps, *packed_linear(MXFP4, 20, BFLOAT, H=128))
    assert (of_experts == experts_kernels(32, "bfloat")) == taken
    assert of_linear.startswith("tensor") == taken


NOT_TODAY = """
for word; do
  case $word in *program_source.cpp)
    if grep -q tensor_products "$word"; then echo tried >> tries; echo 'error: not today' >&2; exit 1; fi
  esac
done
exec $(command -v clang++-19 || command -v clang++) "$@"
"""


def test_other_kernels_run_where_these_do_not_compile(tmp_path: Path):
    """Without an error, and without another try."""
    script = """
torch.ops.moe_metal._set_tuning(["tensor_ops"], [1])
weight, x = torch.ones(8, 64, device="mps").bfloat16(), torch.ones(9, 64, device="mps").bfloat16()
with metal_sim.playing_macos(26, 3), metal_sim.record() as record:
    outputs = [torch.ops.moe_metal.linear(x, weight) for _ in range(2)]
print(record.kernels, all(bool((one == 64).all()) for one in outputs))
"""
    assert lines_of(script, NOT_TODAY, tmp_path) == [
        "['linear_tiles16_wide_bfloat', 'linear_tiles16_wide_bfloat'] True"
    ]
    assert (tmp_path / "tries").read_text().split() == ["tried"]


def test_warmup_compiles_them(mps: str):
    """On meta, where nothing is encoded."""
    import metal_sim

    linear = Case("linear", "warmup", {"T": 40, "N": 24, "H": 64}, dtype=BFLOAT)
    for case, size in {linear: (40, 24), dense(): (DIMS["T"], DIMS["H"])}.items():
        on_meta = {name: tensor.to("meta") for name, tensor in case.arguments().items()}
        with units(), metal_sim.record() as record:
            got = getattr(torch.ops.moe_metal, case.op).default.redispatch(MPS, **on_meta)
        assert not record.dispatches and got.shape == size and got.is_meta
