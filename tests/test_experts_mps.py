"""The op experts on mps, beyond its values: its kernels and dispatches, and how slots are assigned to tiles."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

import dispatch_table
from cases import BFLOAT, Case, call, expected
from checks import assert_matches
from conftest import SIMULATED
from packings import AFFINE, FP8, MXFP4, PACKINGS, Packing
from torch_moe_metal import gpu_settings, quantize, reference
from torch_moe_metal.random_weights import FORMATS

recorded = pytest.mark.skipif(not SIMULATED, reason="the simulated Metal records dispatches; a Mac's own does not")


def kernels_of(run) -> list[str]:
    """The kernels that `run` dispatches, without the op's name. The host must not wait for the device."""
    import metal_sim

    with metal_sim.record() as record:
        run()
    assert not record.host_syncs
    return [name.removeprefix("experts_") for name in record.kernels]


def experts_kernels(args: dict, **options) -> list[str]:
    return kernels_of(lambda: torch.ops.moe_metal.experts(**args, **options))


@contextlib.contextmanager
def settings(**values: int) -> Iterator[None]:
    gpu_settings.use(values)
    try:
        yield
    finally:
        gpu_settings.use({})


# ------------------------------------------------------------------------------------------------ dispatches


@recorded
def test_dispatches_of_a_layer(mps: str):
    """Qwen3-30B-A3B's MoE block for one token: at most 4 dispatches with its router, compared with the stock block."""
    import metal_sim

    E, K, H, I = 128, 8, 2048, 768
    x = torch.zeros(1, H, dtype=BFLOAT, device=mps)
    one_expert = {"gate_up": (1, 2 * I, H), "down": (1, H, I)}  # the layout of all experts, with the memory of one
    weights = {n: torch.zeros(s, dtype=BFLOAT, device=mps).expand(E, -1, -1) for n, s in one_expert.items()}
    router = torch.zeros(E, H, dtype=BFLOAT, device=mps)
    residual = torch.zeros_like(x)

    def layer() -> None:
        routing, ids = torch.ops.moe_metal.gate(x, router, top_k=K)
        torch.ops.moe_metal.experts(x, routing, ids, **weights, residual=residual)

    with metal_sim.host_only():
        ours = kernels_of(layer)
    assert ours[-2:] == ["gate_up_rows_wide_bfloat", "down_rows_wide_bfloat"]
    assert len(ours) <= 4, ours

    small = {"hidden_size": 64, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(num_experts=E, num_experts_per_tok=K, norm_topk_prob=True, **small)
    config._experts_implementation = "batched_mm"
    block = Qwen3MoeSparseMoeBlock(config).to(mps, BFLOAT)
    token = torch.zeros(1, 1, 64, dtype=BFLOAT, device=mps)
    with torch.no_grad(), ComputingOps() as stock:
        block(token)
    print(f"\n{len(ours)} dispatches: {', '.join(ours)}\n{len(stock.names)} stock ops: {', '.join(stock.names)}")
    assert len(stock.names) >= 3 * len(ours)


class ComputingOps(TorchDispatchMode):
    """The aten ops that compute or copy, each of which needs at least one dispatch; views and empty tensors do not."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
        name = function.__name__.split(".")[0]
        if not is_view and not name.startswith(("empty", "_unsafe_view")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@recorded
def test_no_tokens_no_dispatches(mps: str):
    assert experts_kernels(Case("experts", "empty", {"T": 0, "E": 3, "K": 2, "H": 8, "I": 8}).arguments(mps)) == []


# ------------------------------------------------------------------------------------------------ the choice of kernels


@recorded
@pytest.mark.parametrize("T, E, K, kernels", [(16, 8, 1, 2), (17, 8, 1, 4), (4, 32, 8, 2), (5, 32, 8, 4)])
def test_switch(mps: str, T: int, E: int, K: int, kernels: int):
    """Two dispatches for decode, up to 16 slots or as many slots as experts; then four for prefill."""
    args = Case("experts", "switch", {"T": T, "E": E, "K": K, "H": 32, "I": 32}).arguments(mps)
    assert len(experts_kernels(args)) == kernels


@recorded
@pytest.mark.parametrize("slots, rows", [(11, 16), (12, 32), (48, 32), (49, 64)])
def test_tile_follows_tokens_per_expert(mps: str, slots: int, rows: int):
    args = Case("experts", "tile", {"T": slots, "E": 4, "K": 4, "H": 16, "I": 16}).arguments(mps)
    assert experts_kernels(args) == [
        "sort",
        f"gate_up_tiles{rows}_wide_float",
        f"down_tiles{min(rows, 32)}_wide_float",
        "combine_float",
    ]


LAYOUTS = {  # H, I, options, whether the weights' storage begins one element late -> the kernels of gate_up and down
    "rows": (64, 32, {}, False, ("rows_wide", "rows_wide")),
    "rows_interleaved": (64, 32, {"interleaved": True}, False, ("rows_wide", "rows_wide")),
    "rows_odd": (63, 33, {}, False, ("rows", "rows")),
    "rows_late": (64, 32, {}, True, ("rows", "rows")),
    "columns": (64, 32, {"transposed": True}, False, ("columns_wide", "columns_wide")),
    "columns_interleaved": (64, 36, {"transposed": True, "interleaved": True}, False, ("columns_wide", "columns_wide")),
    "columns_half_aligned": (64, 36, {"transposed": True}, False, ("columns", "columns_wide")),
    "columns_odd": (63, 33, {"transposed": True}, False, ("columns", "columns")),
    "columns_late": (64, 32, {"transposed": True}, True, ("columns", "columns")),
}


@recorded
@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(mps: str, name: str, T: int):
    """16-byte loads wherever alignment allows them: along rows, or for transposed weights at decode along columns."""
    H, I, options, late, (gate_up, down) = LAYOUTS[name]
    case = Case("experts", name, {"T": T, "E": 7, "K": 3, "H": H, "I": I}, (), options, BFLOAT)
    args = case.arguments(mps)
    for weight in ("gate_up", "down") if late else ():
        moved = torch.empty(args[weight].numel() + 1, dtype=BFLOAT, device=mps)[1:].view_as(args[weight])
        args[weight] = moved.copy_(args[weight])
    rows = [f"gate_up_{gate_up}_bfloat", f"down_{down}_bfloat"]
    gate_up, down = ("_wide" if layout == "rows_wide" else "" for layout in (gate_up, down))
    tiles = ["sort", f"gate_up_tiles32{gate_up}_bfloat", f"down_tiles32{down}_bfloat", "combine_bfloat"]
    assert experts_kernels(args, **options) == (rows if T == 2 else tiles)
    got = call(torch.ops.moe_metal.experts, "experts", args, options)
    assert_matches(got, expected("experts", case.arguments(), options), case.longest_sum)


# ------------------------------------------------------------------------------------------------ tiles

COUNTS = [(17, 15), (16, 16), (0, 64, 0, 1), (33, 31), (63, 65, 0, 0, 1), (130,), (0, 0, 47), (1,) * 40, (64, 128)]


@pytest.mark.parametrize("skipped", [0, 5])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: "-".join(map(str, counts)))
def test_slots_per_expert(device: str, counts: tuple[int, ...], skipped: int):
    """Each expert gets so many slots in mixed order; `skipped` more slots have invalid ids."""
    E, slots = len(counts), sum(counts) + skipped
    case = Case("experts", "counts", {"T": slots, "E": E, "K": 1, "H": 36, "I": 20}, ("gate_up_bias", "down_bias"))
    args = case.arguments()
    ids = torch.arange(E).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, torch.tensor([-1, E, 1 << 40, -(1 << 40), E + 7])[:skipped]])
    args["ids"] = ids[torch.randperm(slots, generator=torch.Generator().manual_seed(slots))].unsqueeze(1)
    on_device = {name: tensor.to(device) for name, tensor in args.items()}
    got = call(torch.ops.moe_metal.experts, "experts", on_device, {})
    assert_matches(got, expected("experts", args, {}), case.longest_sum)


@recorded
@pytest.mark.parametrize("T", [2, 20, 70])
@pytest.mark.parametrize("transposed", [False, True])
def test_any_order_of_threads(mps: str, T: int, transposed: bool):
    """The simulator runs each dispatch in several thread orders and requires the same bits."""
    import metal_sim

    options = {"transposed": transposed, "interleaved": transposed}
    dims = {"T": T, "E": 4, "K": 2, "H": 72, "I": 40}
    case = Case("experts", "orders", dims, ("gate_up_bias", "down_bias", "shared", "shared_gate"), options, BFLOAT)
    metal_sim.set_orders("forward", "backward", "random:1", "random:2")
    try:
        got = call(torch.ops.moe_metal.experts, "experts", case.arguments(mps), options)
    finally:
        metal_sim.set_orders("forward")
    assert_matches(got, expected("experts", case.arguments(), options), case.longest_sum)


# ------------------------------------------------------------------------------------------------ packed weights

NARROW = [Packing("affine", bits, 16) for bits in AFFINE]  # groups that are smaller than 32 columns
OTHERS = [packing for packing in FORMATS.values() if packing and packing not in PACKINGS]
SCALES = [Packing("affine", 4, 128, torch.float16), Packing("affine", 8, 32, BFLOAT), Packing("fp8", 8, 128, BFLOAT)]
FLOAT = torch.float32
# The fast set compiles shaders for these: 3 bits cross bytes like 5 and 6 bits; 2 bits do not, like 4.
FEW_PACKINGS = [AFFINE[3], AFFINE[4], NARROW[2], AFFINE[8], MXFP4, FP8]
EVERY_PACKING = FEW_PACKINGS + [
    pytest.param(packing, marks=pytest.mark.slow)
    for packing in (*PACKINGS, *NARROW, *SCALES, *OTHERS)
    if packing not in FEW_PACKINGS
]


def sizes_of(packing: Packing) -> tuple[int, int]:
    """H and I that the format allows, but that are no multiple of a tile or of the lanes' chunks."""
    if packing.row.rows_per_scale > 1:
        return 200, 139
    if packing.row.whole_columns > 128:
        return 768, 256
    return (7 * packing.group, 3 * packing.group) if packing.group < 64 else (2 * packing.group, packing.group)


def packed_experts(packing: Packing, T: int, dtype: torch.dtype = FLOAT, interleaved: bool = False):
    """Arguments on the CPU, and options, of experts with packed weights. Some ids are invalid."""
    H, I = sizes_of(packing)
    E, K, generator = 5, 3, torch.Generator().manual_seed(T)
    args = dict(
        zip(
            ("gate_up", "gate_up_scale", "gate_up_offset"),
            packing.weight(E, 2 * I, H, generator=generator),
            strict=True,
        )
    )
    args |= dict(zip(("down", "down_scale", "down_offset"), packing.weight(E, H, I, generator=generator), strict=True))
    args |= {
        "x": torch.randn(T, H, generator=generator).to(dtype),
        "weights": torch.rand(T, K, generator=generator),
        "ids": torch.randint(0, E + 1, (T, K), generator=generator),
        "gate_up_bias": torch.randn(E, 2 * I, generator=generator),
        "down_bias": torch.randn(E, H, generator=generator),
    }
    return args, {"format": packing.format, "interleaved": interleaved}


def packed_linear(packing: Packing, T: int, dtype: torch.dtype = FLOAT, N: int = 71, H: int | None = None):
    generator = torch.Generator().manual_seed(T)
    H = H or sizes_of(packing)[0]
    weight, scale, offset = packing.weight(N, H, generator=generator)
    x, bias = torch.randn(T, H, generator=generator).to(dtype), torch.randn(N, generator=generator)
    return {"x": x, "weight": weight, "scale": scale, "offset": offset, "bias": bias}, {"format": packing.format}


def long_rows(packing: Packing) -> int:
    """More columns than two steps of the lanes of a row, in whole chunks."""
    whole = max(32, packing.group, packing.row.whole_columns)
    return -(-1056 // whole) * whole


# Formats that the tests of every format do not multiply with several tokens.
TOGETHER = [packing for packing in (*PACKINGS, *OTHERS) if packing not in (FORMATS["nvfp4"], FORMATS["q4_0"])]
in_both_dtypes = pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
in_every_format = pytest.mark.parametrize(
    "packing",
    [FORMATS["nvfp4"], FORMATS["q4_0"], *(pytest.param(p, marks=pytest.mark.slow) for p in TOGETHER)],
    ids=str,
)


def in_float64(op: str, args: dict, options: dict) -> torch.Tensor:
    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in args.items()}
    return getattr(reference, op)(**wide, **options)


def given(args: dict, device: str) -> dict:
    return {name: tensor.to(device) for name, tensor in args.items() if tensor is not None}


def check(op: str, args: dict, options: dict, device: str) -> None:
    got = getattr(torch.ops.moe_metal, op)(**given(args, device), **options)
    assert_matches([got], [in_float64(op, args, options)], args["x"].shape[-1])


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("packing", EVERY_PACKING, ids=str)
def test_packed_experts(device: str, packing: Packing, T: int):
    """Decode of one token and of several, and prefill, in every format, with groups that end inside of a tile."""
    check("experts", *packed_experts(packing, T, interleaved=T == 3), device)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 9, 33, 70])
@pytest.mark.parametrize("packing", [AFFINE[3], AFFINE[4], NARROW[2], MXFP4, FP8], ids=str)
def test_packed_linear(device: str, packing: Packing, T: int):
    check("linear", *packed_linear(packing, T), device)


@in_both_dtypes
@in_every_format
def test_tokens_together(device: str, packing: Packing, dtype: torch.dtype):
    """Token counts for which each weight is unpacked once, for pairs and groups of four with some missing; and rows so
    long that several simdgroups divide them. Codes with 16-bit activations are not centred."""
    for T in (2, 7):
        check("linear", *packed_linear(packing, T, dtype, 37, long_rows(packing)), device)


@recorded
@pytest.mark.parametrize("T, together", [(1, ""), (2, "2"), (3, "4"), (8, "4")])
def test_tokens_per_product(mps: str, T: int, together: str):
    args, options = packed_linear(AFFINE[4], T)
    dense = Case("linear", "together", {"T": T, "N": 9, "H": 96}, dtype=BFLOAT).arguments(mps)
    odd = Case("linear", "alone", {"T": T, "N": 9, "H": 97}, dtype=BFLOAT).arguments(mps)
    called = [(given(args, mps), options), (dense, {}), (odd, {})]
    assert kernels_of(lambda: [torch.ops.moe_metal.linear(**one, **options) for one, options in called]) == [
        f"linear_rows{together}_wide_affine4_float",
        f"linear_rows{together}_wide_bfloat",
        "linear_rows_bfloat",
    ]


# ------------------------------------------------------------------------------------------------ slots together


# Ids of experts in 0..4; -1, 5 and 9 are invalid.
ROUTES = {
    "two tokens": [[1, 4, 0], [4, 2, 1]],
    "all alike": [[3, 0]] * 7,
    "none alike": [[0, 1], [2, 3], [4, -1]],
    "none valid": [[5, -1, 9], [-1, 5, 9]],
    "again in a token": [[2, 2, 0], [0, 2, 2], [2, 0, 0], [1, 1, 1], [2, 1, 3]],
    "more than 4": [[k, 4] for k in (0, 1, 0, 5, 0, 0, 1, 0, 0)],
    "more slots than lanes": [[n % 5, (n + 1) % 5, -1, (n * n) % 5] for n in range(13)],
    "too many for a list": [[(n + k) % 6 for k in range(17)] for n in range(3)],
}


def routed(args: dict, route: str) -> dict:
    ids = torch.tensor(ROUTES[route])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(ids), args["x"].shape[-1], generator=generator).to(args["x"].dtype)
    return args | {"x": x, "ids": ids, "weights": torch.rand(ids.shape, generator=generator)}


#: Slots of one expert are multiplied together in both products, in decode of more than one token.
PAIRS = {"gate_up_pairs_percent": 1, "down_pairs_percent": 1, "decode_max_slots_percent": 2000}


@pytest.mark.parametrize("route", ROUTES)
def test_slots_together(mps: str, route: str):
    """Packed and dense, with rows of gate and up that alternate, and biases."""
    args, options = packed_experts(MXFP4, 3, interleaved=True)
    case = Case("experts", "together", {"T": 1, "E": 5, "K": 3, "H": 72, "I": 44}, ("gate_up_bias", "down_bias"))
    with settings(**PAIRS):
        check("experts", routed(args, route), options, mps)
        check("experts", routed(case.arguments(), route), {}, mps)


@in_both_dtypes
@in_every_format
def test_slots_together_in_every_format(mps: str, packing: Packing, dtype: torch.dtype):
    args, options = packed_experts(packing, 3, dtype)
    with settings(**PAIRS):
        check("experts", routed(args, "again in a token"), options, mps)


@recorded
@pytest.mark.parametrize("T, gate_up", [(1, "rows"), (7, "rows"), (8, "rows2")])
def test_pairs_are_used_if_slots_suffice(mps: str, T: int, gate_up: str):
    """By default from one slot per expert on."""
    args = Case("experts", "kernels", {"T": T, "E": 24, "K": 3, "H": 64, "I": 32}, dtype=BFLOAT).arguments(mps)
    assert experts_kernels(args) == [f"gate_up_{gate_up}_wide_bfloat", "down_rows_wide_bfloat"]


@recorded
@pytest.mark.parametrize(
    "T, K, gate_up, down", [(1, 3, "rows", "rows"), (2, 16, "rows2", "rows2"), (3, 17, "rows2", "rows")]
)
def test_kernels_of_pairs(mps: str, T: int, K: int, gate_up: str, down: str):
    """A list has 32 slots. Rows that are not aligned are read for each slot."""
    sizes = {"T": T, "E": 64, "K": K, "I": 32}
    wide, odd = (Case("experts", "kernels", sizes | {"H": H}, dtype=BFLOAT).arguments(mps) for H in (64, 63))
    with settings(**PAIRS):
        assert experts_kernels(wide) == [f"gate_up_{gate_up}_wide_bfloat", f"down_{down}_wide_bfloat"]
        assert experts_kernels(odd) == ["gate_up_rows_bfloat", f"down_{down}_wide_bfloat"]


@recorded
def test_pairs_in_any_order_of_threads(mps: str):
    """And with threadgroups beyond the last slot, token or row."""
    import metal_sim

    args, options = packed_experts(MXFP4, 3)
    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        with settings(**PAIRS), metal_sim.more_threadgroups(3):
            check("experts", routed(args, "again in a token"), options, mps)
    finally:
        metal_sim.set_orders("forward")


@recorded
def test_shared_experts_are_read_once(mps: str):
    """Four tokens that selected the same experts, instead of different ones."""
    import metal_sim

    def loaded(route: list[list[int]], pairs: dict[str, int]) -> list[int]:
        case = Case("experts", "loads", {"T": len(route), "E": 16, "K": 2, "H": 256, "I": 128}, dtype=BFLOAT)
        args = case.arguments(mps) | {"ids": torch.tensor(route, device=mps)}
        with settings(**pairs), metal_sim.record(costs=True) as record:
            torch.ops.moe_metal.experts(**args)
        return [dispatch.costs.device_loaded for dispatch in record.dispatches]

    down = 256 * 128 * 2  # bytes of one expert; gate_up has twice as many
    alike, apart = [[3, 5]] * 4, [[2 * n, 2 * n + 1] for n in range(4)]
    for pairs, passes in (({}, 8), (PAIRS, 4)):
        saved = [a - b for a, b in zip(loaded(apart, pairs), loaded(alike, pairs), strict=True)]
        assert saved == pytest.approx([(8 - passes) * size for size in (2 * down, down)], abs=0.3 * down)  # x and inner


@pytest.mark.parametrize("bits", AFFINE)
def test_offsets_cost_no_precision(mps: str, bits: int):
    """Offsets are close to -2^(bits - 1) scales. Sums of uncentred codes and sums of offsets would almost cancel, with
    errors 3 to 4 times those of PyTorch's product with the values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, generator=generator)
    parts = quantize(torch.randn(512, 64, generator=generator), "affine", bits)
    values = reference.dequantize(*parts, format="affine", bits=bits, dtype=FLOAT)
    exact = reference.linear(x.double(), parts[0], *(part.double() for part in parts[1:]), format="affine")
    got = torch.ops.moe_metal.linear(*(tensor.to(mps) for tensor in (x, *parts)), format="affine").cpu()
    assert (got - exact).norm() <= 2 * (x @ values.T - exact).norm()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), BFLOAT], ids=str)
def test_packed_weights_and_16_bits(device: str, dtype: torch.dtype):
    for packing in (AFFINE[4], MXFP4):
        for T in (2, 40):
            check("experts", *packed_experts(packing, T, dtype), device)
            check("linear", *packed_linear(packing, T, dtype), device)


@pytest.mark.parametrize("packing", [*PACKINGS, *NARROW], ids=str)
def test_dequantize(device: str, packing: Packing):
    """Every code, including e4m3's two NaN, and matrices with more than three dimensions."""
    H, _ = sizes_of(packing)
    generator = torch.Generator().manual_seed(0)
    weight = packing.weight(2, 3, 9, H, generator=generator)
    if packing.format in ("fp8", "mxfp8"):
        weight[0][1, 2, 3, 4], weight[0][1, 2, 4, 5] = 0x7F, 0xFF
    options = {"format": packing.format, "bits": packing.bits}
    for dtype in (FLOAT, BFLOAT):
        on_device = (None if tensor is None else tensor.to(device) for tensor in weight)
        got = torch.ops.moe_metal.dequantize(*on_device, **options, dtype=dtype)
        wide = (t.double() if t is not None and t.is_floating_point() else t for t in weight)
        assert_matches([got], [reference.dequantize(*wide, **options, dtype=torch.float64)])


@pytest.mark.parametrize("dtype", [FLOAT, torch.float16, BFLOAT], ids=str)
def test_dequantize_dense(device: str, dtype: torch.dtype):
    weight = torch.randn(3, 21, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = torch.ops.moe_metal.dequantize(weight.mT.to(device), format="dense", dtype=FLOAT)
    assert torch.equal(got.cpu(), weight.mT.float())


# The memory of views: bytes before the weight, bytes between rows, and scales of a larger tensor.
def late(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    return torch.empty(tensor.numel() + by, dtype=tensor.dtype)[by:].view_as(tensor).copy_(tensor)


def apart(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + by, dtype=tensor.dtype)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


VIEWS = {
    "late": late,
    "apart": apart,
    "upside_down": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("packing", [AFFINE[3], NARROW[2], MXFP4, FP8, SCALES[1]], ids=str)
def test_views_of_packed_weights(device: str, packing: Packing, view: str, T: int):
    """Data that is not aligned for vector loads, and scales with any strides: the same values."""
    args, options = packed_experts(packing, T)
    for name in ("gate_up", "gate_up_scale", "gate_up_offset", "down", "down_scale", "down_offset"):
        if args[name] is not None:
            args[name] = VIEWS[view](args[name])
    on_device = given(args, device)
    for name in ("gate_up", "down"):  # in the layout of the view
        memory = torch.empty(args[name].untyped_storage().nbytes(), dtype=torch.uint8, device=device)
        strided = memory.view(args[name].dtype).as_strided(
            args[name].shape, args[name].stride(), args[name].storage_offset()
        )
        on_device[name] = strided.copy_(args[name])
    got = torch.ops.moe_metal.experts(**on_device, **options)
    assert_matches([got], [in_float64("experts", args, options)], args["x"].shape[-1])


def test_mxfp4_in_blocks(device: str):
    """[.., C / 32, 16], as in gpt-oss."""
    for T in (2, 40):
        args, options = packed_experts(MXFP4, T, interleaved=True)
        want = in_float64("experts", args, options)
        args |= {name: args[name].unflatten(-1, (-1, 16)) for name in ("gate_up", "down")}
        got = torch.ops.moe_metal.experts(**given(args, device), **options)
        assert_matches([got], [want], args["x"].shape[-1])


@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("packing", [AFFINE[4], MXFP4, FP8], ids=str)
def test_nan_does_not_spread(device: str, packing: Packing, T: int):
    """A NaN scale or code makes only its own row NaN."""
    args, options = packed_linear(packing, T, H=256 if T == 3 else None)  # four columns at a time
    if packing.format == "fp8":
        args["weight"][5, 150] = 0xFF
    else:
        args["scale"][5, 1] = 255 if packing.format == "mxfp4" else float("nan")
    got = torch.ops.moe_metal.linear(**given(args, device), **options).cpu()
    assert got.isnan().nonzero()[:, 1].unique().tolist() == [5]
    assert got.isnan()[:, 5].all()


@pytest.mark.parametrize("T", [1, 20])
def test_rows_do_not_read_into_the_next_row(device: str, T: int):
    """Aligned rows that end inside of a vector load: the bytes after them, here NaN, must not be used."""
    args, options = packed_linear(FP8, T)
    want, (N, H) = in_float64("linear", args, options), args["weight"].shape
    on_device = given(args, device)
    on_device["weight"] = torch.full((N, H + 8), 0xFF, dtype=torch.uint8, device=device)[:, :H].copy_(args["weight"])
    assert on_device["weight"].stride(0) % 16 == 0 != H % 16
    assert_matches([torch.ops.moe_metal.linear(**on_device, **options)], [want], H)


@recorded
@pytest.mark.parametrize(
    "packing, kernel, tiles",
    [
        (AFFINE[4], "wide_affine4", "wide_affine4"),
        (NARROW[2], "affine4", "wide_affine4"),
        (MXFP4, "wide_mxfp4", "wide_mxfp4"),
        (FP8, "fp8", "fp8"),
    ],
    ids=str,
)
def test_kernels_of_packed_weights(mps: str, packing: Packing, kernel: str, tiles: str):
    """Two dispatches at decode, four at prefill, and the widest loads if whole chunks are aligned."""
    args, options = packed_experts(packing, 1)
    assert experts_kernels(given(args, mps), **options) == [
        f"{part}_rows_{kernel}_float" for part in ("gate_up", "down")
    ]
    args, options = packed_experts(packing, 40)
    assert experts_kernels(given(args, mps), **options) == [
        "sort",
        f"gate_up_tiles32_{tiles}_float",
        f"down_tiles32_{tiles}_float",
        "combine_float",
    ]
    args, options = packed_linear(packing, 1)
    assert kernels_of(lambda: torch.ops.moe_metal.linear(**given(args, mps), **options)) == [
        f"linear_rows_{kernel}_float"
    ]


@recorded
def test_dispatches_of_packed_weights(mps: str):
    """With a real model's sizes, as counted by the table of dispatches: no more than dense weights need."""
    import metal_sim

    with metal_sim.host_only():
        rows = dispatch_table.recorded(dispatch_table.packed_functions())
    each = {"experts, {}": 2, "linear, {}": 1, "dequantize, {}": 1, "experts, {}, T = 512": 4}
    expected = {name.format(format): n for format, *_ in dispatch_table.PACKED for name, n in each.items()}
    assert {name: len(row.dispatches) for name, row in rows.items()} == expected


@recorded
@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.parametrize("packing", [AFFINE[4], NARROW[1], MXFP4, FP8], ids=str)
def test_packed_weights_in_any_order_of_threads(mps: str, packing: Packing, T: int):
    import metal_sim

    metal_sim.set_orders("forward", "backward", "random:1")
    try:
        check("experts", *packed_experts(packing, T), mps)
        check("linear", *packed_linear(packing, T), mps)
    finally:
        metal_sim.set_orders("forward")
