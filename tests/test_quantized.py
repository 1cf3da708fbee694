"""Packed weights: `quantize`, comparison with other projects on the same bytes, and the memory that ops read."""

import ctypes
import itertools
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import torch_moe_metal
from cases import BFLOAT, FLOAT, HALF, call, expected
from cases.packed import WIDTHS, packed_case, sizes_for, without_signs
from checks import assert_matches, same_bits
from packings import FORMATS, Packing
from torch_moe_metal import formats, packing, quantize, reference

ops = torch.ops.moe_metal
DTYPES = {FLOAT: mx.float32, HALF: mx.float16, BFLOAT: mx.bfloat16}
MLX_WIDTHS = [(bits, group) for bits in formats.BITS for group in (32, 64, 128)]


@pytest.fixture(scope="module", autouse=True)
def _mlx_on_the_cpu():
    mx.set_default_device(mx.cpu)


def to_mlx(tensor: Tensor) -> mx.array:
    """Bytes as words, as in MLX."""
    if tensor.dtype in DTYPES:
        return mx.array(tensor.float().numpy()).astype(DTYPES[tensor.dtype])
    return mx.array(tensor.numpy())


def words(data: Tensor) -> mx.array:
    return mx.array(data.numpy().view(np.uint32))


def from_mlx(array: mx.array) -> Tensor:
    floats = array.dtype in DTYPES.values()
    return torch.from_numpy(np.array(array.astype(mx.float32) if floats else array))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of_all_kinds(dtype: torch.dtype) -> Tensor:
    """[64, 384]: rows from 1e-9 to 1e4, all zero, all equal, all positive and all negative."""
    weight = random(64, 384) * torch.logspace(-9, 4, 64).unsqueeze(-1)
    weight[3], weight[4, :64], weight[5], weight[6] = 0, 1.5, weight[5].abs(), -weight[6].abs()
    return weight.to(dtype)


# ------------------------------------------------------------------------------------------------ quantize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits, group", MLX_WIDTHS)
def test_affine_equals_mlx_bitwise(bits: int, group: int, dtype: torch.dtype, device: str):
    weight = weight_of_all_kinds(dtype)
    data, scale, offset = quantize(weight.to(device), "affine", bits, group)
    assert {part.device.type for part in (data, scale, offset)} == {device} and scale.dtype == offset.dtype == dtype
    want = mx.quantize(to_mlx(weight), group_size=group, bits=bits)
    assert torch.equal(data.cpu(), from_mlx(want[0]).view(torch.uint8))
    assert torch.equal(scale.cpu().float(), from_mlx(want[1])) and torch.equal(offset.cpu().float(), from_mlx(want[2]))


@pytest.mark.parametrize("bits", formats.BITS)
def test_affine_groups_of_16_follow_the_same_rule(bits: int):
    """MLX has no groups of 16. If the second half of 32 columns repeats the first, results must be equal."""
    weight = weight_of_all_kinds(FLOAT)
    doubled = weight.unflatten(-1, (-1, 16)).repeat_interleave(2, 1).flatten(1)
    _, scale, offset = quantize(weight, "affine", bits, 16)
    data, *others = quantize(doubled, "affine", bits, 32)
    assert torch.equal(scale, others[0]) and torch.equal(offset, others[1])
    codes = reference.unpack(data, bits).unflatten(-1, (-1, 2, 16))[:, :, 0].flatten(1)
    assert torch.equal(reference.unpack(quantize(weight, "affine", bits, 16)[0], bits), codes)


def nearest(values: Tensor, grid: Tensor) -> Tensor:
    """The nearest values of a grid, by distance to each of them."""
    return (values.unsqueeze(-1) - grid).abs().amin(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_takes_the_nearest_number(dtype: torch.dtype, device: str):
    weight = weight_of_all_kinds(dtype)
    weight[8:16] *= 2.0**-14
    data, scale, offset = quantize(weight.to(device), "mxfp4")
    assert offset is None and data.dtype == scale.dtype == torch.uint8
    data, scale = data.cpu(), scale.cpu()
    got = reference.dequantize(data, scale, format="mxfp4", dtype=torch.float64).unflatten(-1, (-1, 32))
    groups, powers = weight.double().unflatten(-1, (-1, 32)), torch.exp2(scale.double() - 127).unsqueeze(-1)
    grid = torch.tensor(reference.E2M1, dtype=torch.float64)
    assert torch.equal((groups - got).abs() / powers, nearest(groups / powers, grid))
    largest = groups.abs().amax(-1, keepdim=True)
    assert (largest <= 6 * powers).all() and ((largest > 3 * powers) | (scale == 0).unsqueeze(-1)).all()


def test_mxfp4_ties_go_to_the_even_code():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    data, scale, _ = quantize(torch.stack([values, -values]), "mxfp4")
    got = reference.dequantize(data, scale, format="mxfp4", dtype=FLOAT)
    want = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6]).repeat(4)
    assert torch.equal(got, torch.stack([want, -want]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, C", [(1, 1), (128, 128), (130, 200), (300, 129)])
def test_fp8_equals_pytorch_rounding(N: int, C: int, dtype: torch.dtype, device: str):
    weight = (random(N, C) * torch.logspace(-6, 3, N).unsqueeze(-1)).to(dtype)
    weight[: min(N, 3), : min(C, 5)] = 0
    data, scale, offset = quantize(weight.to(device), "fp8")
    data, scale = data.cpu(), scale.cpu()
    assert offset is None and data.dtype == torch.uint8 and scale.dtype == FLOAT
    for (r, row), (c, column) in itertools.product(enumerate(range(0, N, 128)), enumerate(range(0, C, 128))):
        block = weight[row : row + 128, column : column + 128].float()
        largest = block.abs().max()
        assert scale[r, c] == (largest / 448 if largest > 0 else 1)
        want = (block / scale[r, c]).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(data[row : row + 128, column : column + 128], want)


@pytest.mark.parametrize("format, bits, group", [width for width in WIDTHS if width[0] in packing.WRITTEN])
def test_quantize_works_in_pieces(format: str, bits: int, group: int, monkeypatch):
    """Leading dimensions, strides and the size of pieces do not change the bytes."""
    weight = random(2, 2, 132, 256)
    whole = quantize(weight, format, bits, group)
    monkeypatch.setattr(packing, "AT_ONCE", 1000)
    strided = torch.empty(256, 2, 132, 2).permute(1, 3, 2, 0).copy_(weight)
    others = (quantize(other, format, bits, group) for other in (strided, weight[1, 1], weight[:0]))
    for part, other, one, empty in zip(whole, *others, strict=True):
        if part is not None:
            assert same_bits(part, other) and same_bits(part[1, 1], one) and empty.shape == (0, *part.shape[1:])
    sizes = packing.packed_sizes(weight.shape, format, bits, group, weight.dtype)
    assert list(sizes.values()) == [(tuple(part.shape), part.dtype) for part in whole if part is not None]


@pytest.mark.parametrize("format", packing.WRITTEN)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_become_nan(format: str, value: float):
    """All values that share its scale become NaN, and no others."""
    weight = random(256, 256)
    weight[5, 70] = value
    data, scale, offset = quantize(weight, format, 4, 64)
    got = reference.dequantize(data, scale, offset, format=format, dtype=FLOAT).isnan()
    group = formats.FORMATS[format].scale_columns or 64
    place = (slice(128), slice(128)) if format == "fp8" else (5, slice(70 // group * group, (70 // group + 1) * group))
    assert got[place].all() and got.sum() == got[place].numel()


def alone(script: str) -> subprocess.CompletedProcess:
    start = "import resource, torch, torch_moe_metal\nfrom test_quantized import *\n"
    return subprocess.run(
        [sys.executable, "-c", start + script], cwd=Path(__file__).parent, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "format", ["affine", "fp8", "nvfp4", "q4_0"]
)  # each has its own code; others differ in numbers
def test_quantize_needs_little_memory(format: str):
    """16 Mi values in one matrix, 32 MiB: a float32 copy would take 64 MiB, and codes and temporaries many times
    that."""
    script = f"""
quantize(random(64, 128), {format!r})
weight = torch.ones(4096, 4096, dtype=BFLOAT)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
parts = quantize(weight, {format!r})
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown * (1024 if sys.platform == "linux" else 1) - sum(part.nbytes for part in parts if part is not None))
"""
    done = alone(script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 << 20


@pytest.mark.parametrize(
    "said, change",
    [
        ("format: expected one of affine, mxfp4, fp8, mxfp8, nvfp4, q4_0, q8_0, got 'dense'", {"format": "dense"}),
        ("format: expected one of affine, mxfp4, fp8, mxfp8, nvfp4, q4_0, q8_0, got 'int4'", {"format": "int4"}),
        ("bits: expected 2, 3, 4, 5, 6 or 8, got 7", {"bits": 7}),
        ("group_size: expected 16, 32, 64 or 128, got 48", {"group_size": 48}),
        ("weight: expected a multiple of 64 columns, its group_size, got [4, 96]", {"weight": torch.ones(4, 96)}),
        ("weight: expected a multiple of 32 columns, got [4, 80]", {"weight": torch.ones(4, 80), "format": "mxfp4"}),
        ("weight: expected a multiple of 16 columns, got [4, 72]", {"weight": torch.ones(4, 72), "format": "nvfp4"}),
        ("weight: expected a multiple of 32 columns, got [4, 80]", {"weight": torch.ones(4, 80), "format": "q8_0"}),
        ("weight: expected shape [..., N, C], got [64]", {"weight": torch.ones(64)}),
        ("weight: expected float32, float16 or bfloat16, got float64", {"weight": torch.ones(4, 64).double()}),
        ("weight: expected float32, float16 or bfloat16, got int32", {"weight": torch.ones(4, 64).int()}),
    ],
)
def test_quantize_errors(said: str, change: dict):
    good = {"weight": torch.ones(4, 64), "format": "affine", "bits": 4, "group_size": 64}
    quantize(**good)
    with pytest.raises(ValueError) as raised:
        quantize(**good | change)
    assert str(raised.value) == f"torch_moe_metal.quantize: {said}"


# ------------------------------------------------------------------------------------------------ other projects


@pytest.mark.parametrize("scales", DTYPES, ids=str)
@pytest.mark.parametrize("bits, group", MLX_WIDTHS)
def test_dequantize_affine_equals_mlx(bits: int, group: int, scales: torch.dtype, device: str):
    """Bitwise equal with scales of 16 bits, for which products are exact; otherwise up to the rounding of a product."""
    weight = weight_of_all_kinds(FLOAT)
    data, *others = quantize(weight, "affine", bits, group)
    scale, offset = (part.to(scales) for part in others)
    want = from_mlx(mx.dequantize(words(data), to_mlx(scale.float()), to_mlx(offset.float()), group, bits))
    parts = (data.to(device), scale.to(device), offset.to(device))
    got = ops.dequantize(*parts, format="affine", bits=bits, dtype=FLOAT).cpu()
    specified = reference.dequantize(data, scale, offset, format="affine", bits=bits, dtype=FLOAT)
    if scales != FLOAT:
        assert same_bits(got, want) and same_bits(specified, want)
    allowed = 2.0**-23 * (2**bits * scale.float().abs() + offset.float().abs()).repeat_interleave(group, -1)
    assert ((got - want).abs() <= allowed).all() and ((specified - want).abs() <= allowed).all()


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_dequantize_mxfp4_equals_mlx_and_transformers(blocks: bool, device: str):
    """Bitwise equal, for every byte and every power that float32 can represent."""
    data = torch.randint(256, (3, 64, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = torch.arange(3 * 64 * 5).remainder(252).to(torch.uint8).view(3, 64, 5)
    given = data.unflatten(-1, (5, 16)) if blocks else data
    got = ops.dequantize(given.to(device), scale.to(device), format="mxfp4", dtype=FLOAT).cpu()
    assert same_bits(got, reference.dequantize(given, scale, format="mxfp4", dtype=FLOAT))
    assert same_bits(got, from_mlx(mx.dequantize(words(data), to_mlx(scale), mode="mxfp4", dtype=mx.float32)))
    ours = ops.dequantize(given.to(device), scale.to(device), format="mxfp4", dtype=BFLOAT).cpu()
    theirs = convert_moe_packed_tensors(data.unflatten(-1, (5, 16)), scale, dtype=BFLOAT).mT
    normal = scale.repeat_interleave(32, -1) > 2
    assert same_bits(ours[normal], theirs[normal])


@pytest.mark.parametrize("scales", [FLOAT, BFLOAT], ids=str)
def test_dequantize_fp8_equals_transformers(scales: torch.dtype, device: str):
    data = torch.randint(256, (256, 384), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = random(2, 3).exp().to(scales)
    want = Fp8Dequantize(None)._dequantize_one(data.view(torch.float8_e4m3fn), scale, FLOAT)
    got = ops.dequantize(data.to(device), scale.to(device), format="fp8", dtype=FLOAT).cpu()
    assert got.isnan().sum() > 100
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
    specified = reference.dequantize(data, scale, format="fp8", dtype=FLOAT)
    for other in (want, specified):  # up to the sign of NaN
        assert same_bits(got.nan_to_num(-1.0), other.nan_to_num(-1.0))


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= max(1e-5, reference.tolerance(dtype))


def parts_for_mlx(weight: Tensor, format: str, bits: int, group: int) -> tuple[tuple, tuple, dict]:
    """The same packed weight for us and for MLX, and MLX's options. MLX sums in the dtype of the scales, so scales of
    16 bits are converted to float32."""
    data, *others = quantize(weight, format, bits, group)
    wide = [part.float() if part.is_floating_point() else part for part in others if part is not None]
    theirs = (words(data), *map(to_mlx, wide))
    return (data, *others), theirs, {"group_size": group, "bits": bits, "mode": format}


@pytest.mark.parametrize("T, dtype", [(1, FLOAT), (2, BFLOAT), (5, BFLOAT), (4, HALF), (40, BFLOAT)])
@pytest.mark.parametrize("format, bits, group", [("affine", *width) for width in MLX_WIDTHS] + [("mxfp4", 4, 32)])
def test_linear_equals_mlx_quantized_matmul(format: str, bits: int, group: int, T: int, dtype: torch.dtype):
    ours, theirs, how = parts_for_mlx(random(70, 256).to(dtype), format, bits, group)
    x = random(T, 256, seed=1).to(dtype)
    got = ops.linear(x, *ours, format=format)
    close(got, from_mlx(mx.quantized_matmul(to_mlx(x.float()), *theirs, transpose=True, **how)), dtype)


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("format, bits, group", [("affine", *width) for width in MLX_WIDTHS] + [("mxfp4", 4, 32)])
def test_experts_equal_mlx_gather_qmm(format: str, bits: int, group: int, T: int):
    """As in mlx-lm's SwitchGLU: separate gate, up and down."""
    E, K, H, I = 5, 3, 256, 128
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :K].int()
    x, weights = random(T, H, seed=1), random(T, K, seed=3).softmax(-1)
    gate_up, packed_gate_up, how = parts_for_mlx(random(E, 2 * I, H) * H**-0.5, format, bits, group)
    down, packed_down, _ = parts_for_mlx(random(E, H, I, seed=4) * I**-0.5, format, bits, group)
    names = ("gate_up_scale", "gate_up_offset", "down_scale", "down_offset")
    others = dict(zip(names, gate_up[1:] + down[1:], strict=True))
    got = ops.experts(x, weights, ids, gate_up[0], down[0], **others, format=format)

    def products(inputs: mx.array, parts: tuple) -> mx.array:
        return mx.gather_qmm(inputs, *parts, rhs_indices=to_mlx(ids), transpose=True, **how)

    both = products(to_mlx(x)[:, None, None, :], packed_gate_up)
    gate, up = both[..., :I], both[..., I:]
    slots = from_mlx(products(gate * mx.sigmoid(gate) * up, packed_down).squeeze(-2))
    close(got, (slots * weights.unsqueeze(-1)).sum(-2), FLOAT)


# The formats with integer products on some processor.
AS_INTEGERS = [("affine", 4, group) for group in (16, 32, 64, 128)] + [("affine", 8, 32), ("affine", 8, 64)]
AS_INTEGERS += [("affine", 8, 128), ("mxfp4", 4, 32)]


def columns_of(group: int) -> int:
    return 384 if group == 128 else 448  # 3.5 times 128, if that fits


def integers_times(format: str, bits: int, group: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`linear`, the same in float64, and the sum of the products' magnitudes. Too few rows for tiles."""
    weight = quantize(random(61, x.shape[-1]), format, bits, group)
    values = reference.dequantize(*weight, format=format, bits=bits, dtype=torch.float64)
    x64 = x.double()
    return ops.linear(x, *weight, format=format), x64 @ values.mT, x64.abs() @ values.abs().mT


def assert_meets_every_number(
    T: int, *parts: Tensor | None, format: str, bits: int = 8, dtype: torch.dtype = BFLOAT
) -> None:
    """`linear` with tokens that have a single 1 returns the numbers of a weight [N, C], or a number that is not finite
    in each row that contains one."""
    weight = ops.dequantize(*parts, format=format, bits=bits, dtype=FLOAT)
    columns = torch.randperm(weight.shape[-1], generator=torch.Generator().manual_seed(T))[:T]
    tokens = F.one_hot(columns, weight.shape[-1]).to(dtype)
    got, want = ops.linear(tokens, *parts, format=format).float().T, weight[:, columns]
    finite = weight.isfinite().all(-1)
    assert torch.equal(got.isfinite(), finite.unsqueeze(-1).expand_as(got))
    assert ((got - want).abs() <= 2.0**-7 * want.abs() + 2.0**-126)[finite].all()  # subnormal numbers may become 0


@pytest.mark.parametrize(
    "packing", [*filter(None, FORMATS.values()), Packing("affine", 4, 16), Packing("affine", 4, 32)], ids=str
)
def test_many_tokens_meet_every_number(packing: Packing):
    """The CPU unpacks a strip of 16 rows during its product with 9 to 40 tokens, of which the last may be half a tile,
    and keeps it for more. It unpacks 64 columns at a time, and has other ways for the rest of rows and columns."""
    for C in {max(packing.whole_columns, 128), max(packing.whole_columns, 32) * 5}:
        parts = packing.weight(75, C, generator=torch.Generator().manual_seed(C))
        for T in (16, 18, 28, 36, 44, 60, 70):
            assert_meets_every_number(min(T, C), *parts, format=packing.format, bits=packing.bits)


@pytest.mark.parametrize("format, dtype", [("affine4", BFLOAT), ("mxfp4", BFLOAT), ("affine4", FLOAT)])
def test_many_tokens_by_many_rows(format: str, dtype: torch.dtype):
    """On the CPU a work item has 128 rows, the last one here 74. As integers, up to four panels of 32 rows are
    multiplied by the same tokens. As floats, panels have 64 rows, and those of the rest 32. With many threads, an item
    would have only 32 rows."""
    packing = FORMATS[format]
    parts = packing.weight(2122, 320, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_meets_every_number(150, *parts, format=packing.format, bits=packing.bits, dtype=dtype)
    finally:
        torch.set_num_threads(before)


def test_many_tokens_meet_every_scale_of_mxfp8():
    """Products of some scales are subnormal or infinite. A strip may have scales of both kinds."""
    data = torch.randint(256, (272, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data[:256] = torch.where(data[:256] & 127 == 127, 0, data[:256])  # only the last rows contain NaN
    scale = torch.cat([torch.arange(256), torch.full((16,), 127)]).byte().unsqueeze(-1).repeat(1, 4)
    assert_meets_every_number(40, data, scale, format="mxfp8")


@pytest.mark.parametrize("format, bits, group", AS_INTEGERS)
def test_few_tokens_of_any_magnitude(format: str, bits: int, group: int):
    """If tokens are converted to integers, a small value next to a large one has few bits, but enough."""
    x = random(7, columns_of(group)).to(BFLOAT)
    x[0, 5::128] = 4000.0
    x[1] *= 1e-28
    x[2] *= 1e30
    x[3, :128] = 0.0
    x[4] = 0.0
    x[5, 128:256] *= 2.0**-40
    for some in (x, x[:1], x[4:6], x[:3], x[:4], x[:5], x[:6], x.repeat(3, 1)):
        got, want, size = integers_times(format, bits, group, some)
        assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-17 * size).all()
        assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("format, bits, group", AS_INTEGERS)
def test_few_tokens_of_tiny_numbers(format: str, bits: int, group: int):
    """A processor's products of bfloat16 count numbers below 2^-126 as 0. Large weights make them large."""
    weight = quantize(random(70, columns_of(group)) * 2.0**60, format, bits, group)
    values = reference.dequantize(*weight, format=format, bits=bits, dtype=torch.float64)
    x = (random(7, columns_of(group)) * 2.0**-128).to(BFLOAT)
    x[1] *= 2.0**20
    for some in (x, x[:1], x[4:6]):
        want, size = some.double() @ values.mT, some.double().abs() @ values.abs().mT
        got = ops.linear(some, *weight, format=format).double()
        assert ((got - want).abs() <= 2.0**-8 * want.abs() + 2.0**-17 * size).all()


def with_a_column_of_zeros(format: str, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """A packed weight of 70 rows whose first column is 0, like the contribution of its offsets to centred codes."""
    data, scale, offset = quantize(random(70, columns_of(group)).where(torch.arange(columns_of(group)) > 0, 0), format,
                                   bits, group)  # fmt: skip
    if format == "affine":
        middle = 2 ** (bits - 1)
        offset = scale * -middle
        data[:, 0] = data[:, 0] & 0xF0 | middle if bits == 4 else middle
    return data, scale, offset


@pytest.mark.parametrize("large", [2.0**10, 2.0**15, 2.0**18, 2.0**22, 2.0**40, 2.0**70])
@pytest.mark.parametrize("format, bits, group", AS_INTEGERS)
def test_few_tokens_with_a_number_that_no_weight_uses(format: str, bits: int, group: int, large: float):
    """Massive activations exist. Values next to them must keep their precision."""
    weight = with_a_column_of_zeros(format, bits, group)
    values = reference.dequantize(*weight, format=format, bits=bits, dtype=torch.float64)
    x = random(7, columns_of(group)) * torch.logspace(0, -9, 7).unsqueeze(-1)
    x[:, ::3] *= 2.0**-20
    x[:, 0] = large
    x[3, 0], x[5, 1] = 0, 0
    x = x.to(BFLOAT)
    want, size = x.double() @ values.mT, x.double().abs() @ values.abs().mT
    if format == "affine":  # float sums subtract what the centring adds, and round both
        size += x.double().abs() @ (0.25 * weight[2].abs().double().repeat_interleave(group, 1)).mT
    for some in (slice(0, 7), slice(1), slice(1, 3), slice(2, 6)):
        got = ops.linear(x[some], *weight, format=format).double()
        assert ((got - want[some]).abs() <= 2.0**-8 * want[some].abs() + 2.0**-20 * size[some]).all()


@pytest.mark.slow_on_mps
@pytest.mark.parametrize("tokens", [1, 3, 5])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_few_tokens_with_codes_far_from_their_middle(bits: int, tokens: int, device: str):
    """All codes are 0, so the weights are the small offsets. The intermediate result of `experts` is up to 50 and may
    be rounded; the error must be multiplied by the weights, and not by the middle of the codes times the scales."""
    x = random(tokens, 256).to(BFLOAT)
    gate_up = [part.unsqueeze(0) for part in quantize(random(1024, 256, seed=1) * 0.2, "affine", bits, 64)]
    scale = random(1, 256, 8, seed=2).abs() + 0.5
    down = [torch.zeros(1, 256, 64 * bits, dtype=torch.uint8), scale, scale * random(1, 256, 8, seed=3) / 4]
    names = [f"{weight}{part}" for weight in ("gate_up", "down") for part in ("", "_scale", "_offset")]
    weights = dict(zip(names, [*gate_up, *down], strict=True)) | {"format": "affine", "activation": "relu2"}
    doubles = {name: part.double() if torch.is_tensor(part) and part.is_floating_point() else part
               for name, part in weights.items()}  # fmt: skip
    ones, ids = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64)
    want = reference.experts(x.double(), ones.double(), ids, **doubles)
    weights = {name: part.to(device) if torch.is_tensor(part) else part for name, part in weights.items()}
    close(ops.experts(x.to(device), ones.to(device), ids.to(device), **weights).cpu(), want, BFLOAT)


@pytest.mark.parametrize("large", [2.0**12, 2.0**15, 2.0**40])
@pytest.mark.parametrize("format, bits, group", AS_INTEGERS)
def test_many_tokens_with_a_number_that_no_weight_uses(format: str, bits: int, group: int, large: float):
    """For many tokens, weights may be rounded to bfloat16. Token 7 is too small for digits."""
    weight = with_a_column_of_zeros(format, bits, group)
    values = reference.dequantize(*weight, format=format, bits=bits, dtype=torch.float64)
    x = random(21, columns_of(group))
    x[:, 0] = large
    x[3, 0], x[5], x[7, 0] = 0, 0, 0
    x[7] *= 2.0**-110
    x = x.to(BFLOAT)
    want, size = x.double() @ values.mT, x.double().abs() @ values.abs().mT
    if format == "affine":
        size += 2.0**-12 * x.double().abs() @ (weight[2].abs().double().repeat_interleave(group, 1)).mT
    got = ops.linear(x, *weight, format=format).double()
    assert ((got - want).abs() <= 2.0**-8 * (want.abs() + size)).all()


# On mps the fast set has one dtype of each width, in turn: readers of packed weights do not depend on it.
OF_ONE_DTYPE = {
    ("affine", 4): BFLOAT,
    ("affine", 5): FLOAT,
    ("affine", 8): FLOAT,
    ("mxfp4", 4): BFLOAT,
    ("fp8", 8): FLOAT,
}
SMALL_SCALES = [
    pytest.param(*width, dtype, marks=[] if dtype == OF_ONE_DTYPE[width[:2]] else pytest.mark.slow_on_mps)
    for width in [("affine", 5, 32), ("affine", 8, 128), *AS_INTEGERS, ("fp8", 8, 128)]
    for dtype in (FLOAT, BFLOAT)
]


@pytest.mark.parametrize("T", [1, 2, 4, 40])
@pytest.mark.parametrize("format, bits, group, dtype", SMALL_SCALES)
def test_small_scale_of_an_infinite_sum(format: str, bits: int, group: int, dtype: torch.dtype, T: int, device: str):
    """Results must be as if each value were scaled before the sum. For many tokens in bfloat16, weights may be rounded
    to it."""
    data, scale, offset = quantize(random(70, columns_of(group)), format, bits, group)
    if format == "mxfp4":
        scale = scale.fill_(2)  # 2^-125: no subnormal values
    else:
        scale = scale * 2.0**-110
        offset = None if offset is None else offset * 2.0**-110
    x = torch.full((T, columns_of(group)), 1e38).to(dtype)
    want = reference.linear(x.double(), data, scale, offset, format=format)
    values = reference.dequantize(data, scale, offset, format=format, bits=bits, dtype=torch.float64)
    parts = (None if part is None else part.to(device) for part in (data, scale, offset))
    got = ops.linear(x.to(device), *parts, format=format).cpu().double()
    size = x.double().abs() @ values.abs().mT
    rounded = device == "mps" or (dtype == BFLOAT and T == 40)
    assert ((got - want).abs() <= 2.0**-8 * want.abs() + (2.0**-8 if rounded else 2.0**-17) * size).all()


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("part", ["scale", "offset"])
@pytest.mark.parametrize(
    "bits", [pytest.param(bits, marks=[] if bits in (3, 4, 8) else pytest.mark.slow_on_mps) for bits in formats.BITS]
)
def test_an_affine_scale_that_is_not_finite(bits: int, part: str, value: float, T: int, device: str):
    """Its products are infinite or NaN, as if each value were scaled before the sum."""
    weight = dict(zip(("weight", "scale", "offset"), quantize(random(9, 128), "affine", bits, 64), strict=True))
    weight[part][2:5, 1] = value
    for x in (random(T, 128, seed=1), torch.ones(T, 128), torch.zeros(T, 128)):
        want = reference.linear(x, **weight, format="affine").isfinite()
        on_device = {name: tensor.to(device) for name, tensor in weight.items()}
        got = ops.linear(x.to(device), **on_device, format="affine").cpu()
        assert torch.equal(got.isfinite(), want) and not want[:, 2:5].any()


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize(
    "format, bits, group", [("affine", 4, 64), ("affine", 8, 32), ("affine", 5, 16), ("fp8", 8, 128)]
)
def test_an_infinite_scale_is_nan_before_a_limit(format: str, bits: int, group: int, T: int, device: str):
    """A limit makes infinite values finite, but products with such a scale are NaN."""
    gate_up, scale, offset = quantize(random(2, 256, 128), format, bits, group)
    down, *others = quantize(random(2, 128, 128), format, bits, group)
    scale[1, -1, -1] = float("inf")
    weights = {"gate_up": gate_up, "gate_up_scale": scale, "gate_up_offset": offset, "down": down}
    weights |= {"down_scale": others[0], "down_offset": others[1]}
    x, ids = random(T, 128, seed=1), torch.arange(1, T + 1).remainder(2).int().unsqueeze(-1)
    given = {"x": x, "weights": torch.ones(T, 1), "ids": ids, **weights}
    options = {"format": format, "activation": "swiglu_oai", "limit": 7.0}
    want = reference.experts(**given, **options)
    given = {name: None if tensor is None else tensor.to(device) for name, tensor in given.items()}
    got = ops.experts(**given, **options).cpu()
    assert torch.equal(got.isfinite(), want.isfinite()) and want[1::2].isfinite().all()
    assert not want[::2].isfinite().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format, bits, group", AS_INTEGERS)
def test_few_tokens_that_are_not_finite(format: str, bits: int, group: int, value: float):
    x = random(3, columns_of(group)).to(BFLOAT)
    x[1, 200] = value
    got, want, _ = integers_times(format, bits, group, x)
    assert not want[1].isfinite().any()
    torch.testing.assert_close(got[1].double(), want[1], equal_nan=True)
    close(got[::2], want[::2], BFLOAT)


# ------------------------------------------------------------------------------------------------ memory


class Wall:
    """Memory that ends at a guard page."""

    def __init__(self):
        self.kept: list = []

    def before(self, tensor: Tensor) -> Tensor:
        """A copy whose last byte is directly before the guard page."""
        size = -(-max(1, tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        self.kept.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
        place = (ctypes.c_uint8 * tensor.nbytes).from_address(start + size - tensor.nbytes)
        return torch.frombuffer(place, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def read_up_to_the_wall(widths: list[tuple[str, int, int]]) -> None:
    """All sizes in all three ops: each part of a weight ends at its own guard page."""
    for width in widths:
        for H, I, N in sizes_for(width):
            calls = [("dequantize", 1, FLOAT)]
            calls += itertools.product(("linear", "experts"), (1, 2, 3, 5, 33), (FLOAT,))
            calls += itertools.product(("linear", "experts"), (1, 3, 33), (BFLOAT,))
            for op, T, dtype in calls:
                dims = {"T": T, "E": 2, "K": 2, "H": H, "I": I, "N": N}
                case = packed_case(op, "wall", width, dims, {}, dtype, (), [without_signs])
                args, wall = case.arguments(), Wall()
                walled = {name: wall.before(tensor) for name, tensor in args.items()}
                print(case, flush=True)
                got = call(getattr(ops, op), op, walled, case.options)
                if dtype == FLOAT:  # bfloat16 uses other readers, whose values are tested elsewhere
                    assert_matches(got, expected(op, args, case.options), case.longest_sum)


ONE_GROUP_EACH = [(bits, formats.GROUPS[i % 4]) for i, bits in enumerate(formats.BITS)]


@pytest.mark.parametrize("widths", [
    pytest.param([width for width in WIDTHS if width[0] != "affine" or width[1:] in ONE_GROUP_EACH], id="some"),
    pytest.param(WIDTHS, id="all", marks=pytest.mark.slow),
])  # fmt: skip
def test_no_read_beyond_the_last_row(widths: list[tuple[str, int, int]]):
    done = alone(f"read_up_to_the_wall({widths!r})")
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]} {done.stderr}"


@pytest.mark.slow
def test_guard_page_traps_overread():
    done = alone("x = Wall().before(torch.ones(4, 5)); print(ctypes.string_at(x.data_ptr() + x.nbytes, 1))")
    assert done.returncode == -(signal.SIGBUS if sys.platform == "darwin" else signal.SIGSEGV)


def mapped(path: Path, tensor: Tensor, files: list) -> Tensor:
    """The same in pages of a file that are mapped read-only."""
    path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    files.append(np.memmap(path, dtype=np.uint8, mode="r"))
    place = (ctypes.c_uint8 * tensor.nbytes).from_address(files[-1].ctypes.data)
    return torch.frombuffer(place, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("format, bits, group", [("affine", 4, 64), ("mxfp4", 4, 32), ("fp8", 8, 128)])
def test_weights_in_read_only_mapped_files(tmp_path: Path, format: str, bits: int, group: int):
    """Read-only pages: results are correct, and nothing writes."""
    case = packed_case("experts", "mapped", (format, bits, group), {"T": 3, "E": 6, "H": 256, "I": 128}, {})
    args = case.arguments()
    files: list[np.memmap] = []
    weights = {name: tensor for name, tensor in args.items() if name.startswith(("gate_up", "down"))}
    args |= {name: mapped(tmp_path / name, tensor, files) for name, tensor in weights.items()}
    got = call(ops.experts, "experts", args, case.options)
    assert_matches(got, expected("experts", case.arguments(), case.options), case.longest_sum)


ANONYMOUS = """
def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's anonymous pages")
@pytest.mark.parametrize("T", [1, 64])
def test_weights_are_never_copied(tmp_path: Path, T: int):
    """Sparse files of 6 GB, of which each token reads two experts: no copy of that size is made."""
    E, N, H = 1024, 2 * 2048, 2048
    with open(tmp_path / "gate_up", "wb") as file:
        file.truncate(E * N * H // 2)
    with open(tmp_path / "down", "wb") as file:
        file.truncate(E * N // 2 * H // 2)
    script = f"""
{ANONYMOUS}
gate_up = torch.from_file({str(tmp_path / "gate_up")!r}, size={E * N * H // 2}, dtype=torch.uint8)
down = torch.from_file({str(tmp_path / "down")!r}, size={E * N * H // 4}, dtype=torch.uint8)
one = torch.ones(1, dtype=BFLOAT)
scales = dict(gate_up_scale=one.expand({E}, {N}, {H // 64}), gate_up_offset=one.expand({E}, {N}, {H // 64}),
              down_scale=one.expand({E}, {H}, {N // 128}), down_offset=one.expand({E}, {H}, {N // 128}))
ids = torch.tensor([[0, {E - 1}]]).expand({T}, 2)
x = torch.full(({T}, {H}), {H}**-1)
before = anonymous()
y = ops.experts(x, torch.full(({T}, 2), 0.5), ids, gate_up.view({E}, {N}, {H // 2}), down.view({E}, {H}, {N // 4}),
                **scales, format="affine", activation="relu2")
assert torch.allclose(y, torch.full_like(y, {N / 2})), y
print(anonymous() - before)
"""
    done = alone(script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 << 20


@pytest.mark.full_grid
@pytest.mark.slow
@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.parametrize("format, bits, group", [("affine", 4, 32), ("mxfp4", 4, 32), ("fp8", 8, 128)])
def test_packed_experts_beyond_32_bits(format: str, bits: int, group: int, T: int, device: str):
    """2^33 bytes between the first and the last expert, in data and scales; only those have values."""
    small = packed_case("experts", "far", (format, bits, group), {"T": T, "E": 2, "H": 96, "I": 32}, {}, BFLOAT)
    args = small.arguments(device)
    far = dict(args)
    for name in [name for name in args if name.startswith(("gate_up", "down"))]:
        tensor = args[name]
        shape, step = tensor.shape[1:], 2**33 // tensor.element_size() // 1023
        memory = torch.empty(1023 * step + shape.numel(), dtype=tensor.dtype, device=device)
        far[name] = memory.as_strided((1024, *shape), (step, shape[1], 1))
        far[name][0], far[name][1023] = tensor
    far["ids"] = args["ids"] * 1023
    got = call(ops.experts, "experts", far, small.options)
    assert_matches(got, expected("experts", small.arguments(), small.options), small.longest_sum)


@pytest.mark.full_grid
@pytest.mark.slow
def test_rows_beyond_32_bits(device: str):
    """Two rows of a weight that are 2^33 bytes apart, in `linear` and `dequantize`."""
    case = packed_case("linear", "far", ("affine", 4, 32), {"T": 3, "H": 96, "N": 2}, {})
    args = case.arguments(device)
    for name in ("weight", "scale", "offset"):
        tensor = args[name]
        step = 2**33 // tensor.element_size() + 4
        memory = torch.empty(step + tensor.shape[1], dtype=tensor.dtype, device=device)
        args[name] = memory.as_strided(tensor.shape, (step, 1)).copy_(tensor)
    assert_matches([ops.linear(**args, format="affine")], expected("linear", case.arguments(), case.options))
    x = args.pop("x")
    numbers = ops.dequantize(**args, format="affine", dtype=FLOAT)
    assert_matches([x @ numbers.T], expected("linear", case.arguments(), case.options), case.longest_sum)


def test_leading_dimensions_of_dequantize(device: str):
    for leading in [(), (3,), (2, 3), (1, 2, 2), (0,), (2, 0)]:
        for format, bits, group in (("affine", 3, 32), ("mxfp4", 4, 32), ("fp8", 8, 128)):
            data, scale, offset = quantize(random(*leading, 5, 160), format, bits, group)
            want = reference.dequantize(data, scale, offset, format=format, bits=bits, dtype=HALF)
            parts = (None if part is None else part.to(device) for part in (data, scale, offset))
            got = ops.dequantize(*parts, format=format, bits=bits, dtype=HALF)
            assert got.shape == (*leading, 5, 160)
            assert_matches([got], [want])


def test_dense_is_a_format_like_any_other(device: str):
    weight, x = random(37, 67).to(device), random(6, 67).to(device)
    assert torch.equal(ops.dequantize(weight, format="dense", dtype=HALF), weight.half())
    assert_matches([torch_moe_metal.linear(x, weight)], [F.linear(x.cpu().double(), weight.cpu().double())])
