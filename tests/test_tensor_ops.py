"""experts and linear on mps where kernels of our own use the matrix units (shaders/tensor_ops.metal).

They have never run on a Mac. Here Apple's matmul2d is the simulated Metal's, which refuses what Apple leaves undefined.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import test_experts_grouped as grouped_suite
from cases import BFLOAT, FLOAT, HALF, Args, Case, call, expected
from checks import assert_matches
from conftest import DEVICES, SIMULATED
from packings import AFFINE, FP8, MXFP4, Packing
from simulated import lines_of
from test_experts_mps import in_float64, kernels_of, packed_linear
from torch_moe_metal import gpu_settings
from torch_moe_metal.commands.bench.random_weights import FORMATS
from torch_moe_metal.warmup import MPS

pytestmark = [
    pytest.mark.skipif("mps" not in DEVICES, reason="MOE_METAL_DEVICES leaves mps out, which alone has it"),
    pytest.mark.skipif(not SIMULATED, reason="a Mac may have no matmul2d, and records no dispatches"),
]

#: Packed weights are rounded to 16 bits as well, and all of these errors are independent.
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
    names = ["sort", "grouped_x", of_rows, f"grouped_inner_{plain}", of_rows, f"grouped_combine_{plain}"]
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


DENSE = [name for name, case in grouped_suite.CASES.items() if not case.options.get("transposed")]


@pytest.mark.parametrize("name", DENSE)
def test_dense_experts(mps: str, name: str):
    """All that PyTorch's products are tested with, but transposed weights, which these kernels do not read."""
    check_experts(grouped_suite.CASES[name], mps)


def check_experts(case: Case, mps: str, **numbers: int) -> None:
    share = case.dims["T"] * case.dims["K"] // case.dims["E"]
    args, rows = grouped_suite.arguments(case, mps), 16 if share < 12 else 32 if share < 49 else 64
    with units(**numbers):
        got = []
        ran = kernels(lambda: got.extend(call(torch.ops.moe_metal.experts, "experts", args, case.options)))
    assert ran == experts_kernels(rows, "half" if case.dtype == HALF else "bfloat")
    want = expected("experts", grouped_suite.arguments(case), case.options)
    assert_matches(got, want, case.longest_sum, roundings=ROUNDINGS)


@pytest.mark.parametrize("T", [12, 110])
def test_small_and_large_tiles(mps: str, T: int):
    """Of 16 and 64 rows, one of which spans two tiles for its expert; rows of weights that end inside a block."""
    check_experts(grouped_suite.case("gate_up_bias", dims={"T": T, "H": 136}), mps)


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
    """No tile has rows then."""
    case = grouped_suite.case(*grouped_suite.BIASES, *grouped_suite.ADDED)
    args = grouped_suite.arguments(case)
    args["ids"] = torch.full_like(args["ids"], -1)
    with units():
        got = call(torch.ops.moe_metal.experts, "experts", {n: t.to(mps) for n, t in args.items()}, {})
    assert_matches(got, expected("experts", args, {}))


def test_any_grid_and_order_of_threads(mps: str):
    import metal_sim

    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        with metal_sim.more_threadgroups(3), metal_sim.concurrent_encoders():
            check_experts(grouped_suite.CASES["biases"], mps, tiles_per_band=3)
            with units():
                args, options = packed_linear(AFFINE[4], 40, BFLOAT, H=128)
                check_linear(args, options, mps, ["tensor_products32_affine4_bfloat"])
    finally:
        metal_sim.set_orders("forward")


def test_tensor_ops_have_priority_over_pytorchs_product(mps: str):
    import metal_sim

    with metal_sim.grouped_mm():
        check_experts(grouped_suite.case(), mps, matrix_units=1)


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


REFUSED = {
    "float32": packed_linear(AFFINE[4], 20, FLOAT, H=128),
    "columns": packed_linear(MXFP4, 20, BFLOAT, H=224),
    "odd_dense": (Case("linear", "odd", {"T": 20, "N": 8, "H": 76}, dtype=BFLOAT).arguments(), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_kernels_run_where_rows_do_not_fit(mps: str, name: str):
    with units():
        (kernel,) = linear_kernels(mps, *REFUSED[name])
    assert kernel.startswith("linear_tiles")


def test_other_kernels_run_for_transposed_weights(mps: str):
    case = grouped_suite.CASES["transposed"]
    with units():
        _, ran = grouped_suite.run(grouped_suite.arguments(case, mps), case.options)
    assert any("_tiles" in kernel for kernel in ran) and not any("tensor" in kernel for kernel in ran)


@pytest.mark.parametrize("minor, taken", [(2, False), (3, True)])
def test_macos_26_3_is_needed(mps: str, minor: int, taken: bool):
    args, options = packed_linear(MXFP4, 20, BFLOAT, H=128)
    with units(minor):
        (kernel,) = linear_kernels(mps, args, options)
    assert kernel.startswith("tensor_products") == taken


@pytest.mark.parametrize("least, taken", [(0, False), (20, True), (21, False)])
def test_threshold_of_slots_per_expert(mps: str, least: int, taken: bool):
    """40 tokens with 3 slots, of 6 experts: 20 each. And 20 tokens of a linear layer."""
    case = grouped_suite.case()
    with units(tensor_ops=least):
        _, ran = grouped_suite.run(grouped_suite.arguments(case, mps), {})
        (of_linear,) = linear_kernels(mps, *packed_linear(MXFP4, 20, BFLOAT, H=128))
    assert (
        ran == [f"experts_{name}" if "tensor" not in name else name for name in experts_kernels(32, "bfloat")]
    ) == taken
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

    case = Case("linear", "warmup", {"T": 40, "N": 24, "H": 64}, dtype=BFLOAT)
    on_meta = {name: tensor.to("meta") for name, tensor in case.arguments().items()}
    with units(), metal_sim.record() as record:
        got = torch.ops.moe_metal.linear.default.redispatch(MPS, **on_meta)
    assert not record.dispatches and got.shape == (40, 24) and got.is_meta
