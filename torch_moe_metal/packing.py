"""Weights in few bits: how a matrix of numbers is packed. What the formats mean: `reference.dequantize`.

Plain PyTorch, for any device. C is the columns of a weight [..., N, C], which are packed along each row.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import BITS, FORMATS, GROUPS

#: Neighbouring columns with one scale in mxfp4; rows, and columns, with one in fp8.
MXFP4_GROUP, FP8_BLOCK = FORMATS["mxfp4"].scale_columns, FORMATS["fp8"].scale_rows
#: Numbers that are quantised at a time: each takes up to 80 bytes meanwhile.
PIECE = 1 << 19


def quantize(
    weight: Tensor, format: str = "affine", bits: int = 4, group_size: int = 64
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A weight [..., N, C] of float32, float16 or bfloat16 in one of the packed formats. -> data, scale, offset

        data, scale, offset = torch_moe_metal.quantize(weight, "affine", bits=4, group_size=64)
        y = torch_moe_metal.linear(x, data, scale, offset, format="affine")

    affine: integers of 2, 3, 4, 5, 6 or 8 bits; 16, 32, 64 or 128 columns have a scale and an offset of the weight's
    dtype: to the bit what mlx.core.quantize gives on the CPU. mxfp4: floats of 4 bits; 32 columns have a power of two.
    fp8: e4m3; a block of 128 x 128 has a float32. `bits` and `group_size` are for affine alone, the other two have no
    offset. data is uint8, the bytes of the rows. What shares a scale with a number that is not finite becomes NaN.
    """
    check(weight, format, bits, group_size)
    *leading, N, C = weight.shape
    sizes = packed((N, C), format, bits, group_size, weight.dtype)
    whole = {
        name: torch.empty(*leading, *size, dtype=dtype, device=weight.device) for name, (size, dtype) in sizes.items()
    }
    shared_rows = FP8_BLOCK if format == "fp8" else 1
    step = max(1, PIECE // max(1, C * shared_rows)) * shared_rows
    for index in itertools.product(*map(range, leading)):
        for first in range(0, N, step):
            rows = weight[index][first : first + step].detach().float()
            parts = (
                _affine(rows, bits, group_size) if format == "affine" else {"mxfp4": _mxfp4, "fp8": _fp8}[format](rows)
            )
            for name, part in zip(whole, parts, strict=True):
                place = first // shared_rows if name == "scale" else first
                whole[name][index][place : place + len(part)] = part
    return whole["data"], whole["scale"], whole.get("offset")


def packed(
    size: tuple[int, ...], format: str, bits: int, group_size: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a weight [..., N, C] becomes: size and dtype of data, scale and offset. `dtype` is that of affine scales."""
    *leading, N, C = size
    if format == "mxfp4":
        parts = (C // 2, torch.uint8), (C // MXFP4_GROUP, torch.uint8)
    elif format == "fp8":
        parts = (C, torch.uint8), (-(-C // FP8_BLOCK), torch.float32)
    else:
        parts = (C * bits // 8, torch.uint8), (C // group_size, dtype), (C // group_size, dtype)
    rows = {"scale": -(-N // FP8_BLOCK)} if format == "fp8" else {}
    return {
        name: ((*leading, rows.get(name, N), columns), kind)
        for name, (columns, kind) in zip(("data", *FORMATS[format].parts), parts, strict=True)
    }


def check(
    weight: Tensor, format: str, bits: int, group_size: int, caller: str = "quantize", name: str = "weight"
) -> None:
    """An error where this weight cannot be packed so. `caller` and `name` are what the message calls the two."""

    def expect(right: bool, name: str, what: str, got: object) -> None:
        if not right:
            raise ValueError(f"torch_moe_metal.{caller}: {name}: expected {what}, got {got}")

    floats = (torch.float32, torch.float16, torch.bfloat16)
    expect(format in FORMATS, "format", f"one of {', '.join(FORMATS)}", repr(format))
    expect(weight.dtype in floats, name, "float32, float16 or bfloat16", str(weight.dtype).removeprefix("torch."))
    expect(weight.dim() >= 2, name, "shape [..., N, C]", list(weight.shape))
    if format == "affine":
        expect(bits in BITS, "bits", "2, 3, 4, 5, 6 or 8", bits)
        expect(group_size in GROUPS, "group_size", "16, 32, 64 or 128", group_size)
    group, told = {"affine": (group_size, ", its group_size"), "mxfp4": (MXFP4_GROUP, ""), "fp8": (1, "")}[format]
    expect(weight.shape[-1] % group == 0, name, f"a multiple of {group} columns{told}", list(weight.shape))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers of so many bits (uint8, eight or more in a row) as bytes: what `reference.unpack` reads."""
    if bits == 8:
        return codes
    places = torch.arange(8, device=codes.device, dtype=torch.uint8)
    stream = (codes.unsqueeze(-1) >> places[:bits] & 1).flatten(-2)
    return (stream.unflatten(-1, (-1, 8)) << places).sum(-1, dtype=torch.uint8)


def _affine(rows: Tensor, bits: int, group_size: int) -> tuple[Tensor, ...]:
    """MLX's rule: zero is one of the numbers, and so is the end of a group's range that is farther from it."""
    groups, most = rows.unflatten(-1, (-1, group_size)), 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    below = low.abs() > high.abs()
    scale = ((high - low) / most).clamp(min=1e-7)
    scale, edge = scale.where(below, -scale), low.where(below, high)
    steps = (edge / scale).round()
    scale, offset = torch.where(steps == 0, scale, edge / steps), edge.where(steps != 0, 0)
    codes = ((groups - offset) / scale).round().clamp(0, most).nan_to_num(0.0)
    return pack(codes.to(torch.uint8).flatten(-2), bits), scale.squeeze(-1), offset.squeeze(-1)


def _mxfp4(rows: Tensor) -> tuple[Tensor, ...]:
    """The least power of two with which a group's largest number is not beyond 6, the largest of e2m1."""
    groups = rows.unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponent = _exponent(largest)
    exponent = (exponent - 2 + (largest * _power_of_two(-exponent) > 1.5).int()).clamp(min=-127)
    codes = _nearest_code((groups * _power_of_two(-exponent)).nan_to_num(0.0, 0.0, 0.0), 1, 0)
    scale = (exponent + 127).masked_fill(~largest.isfinite(), 255)
    return pack(codes.flatten(-2), 4), scale.squeeze(-1)


def _fp8(rows: Tensor) -> tuple[Tensor, ...]:
    """A block's largest number becomes 448, the largest of e4m3."""
    N, C = rows.shape
    blocks = F.pad(rows.abs(), (0, -C % FP8_BLOCK, 0, -N % FP8_BLOCK))
    blocks = blocks.unflatten(-1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = blocks.amax((1, 3)) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    of_each = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:N, :C]
    return _nearest_code((rows / of_each).nan_to_num(0.0, 0.0, 0.0), 3, -6), scale


def _nearest_code(values: Tensor, mantissa: int, lowest: int) -> Tensor:
    """Floats of few bits as their codes: the nearest, of two the even one. `lowest` is the subnormal ones' exponent.
    Not by PyTorch's own float8, which not every device has."""
    exponent = _exponent(values).clamp(min=lowest)
    steps = (values.abs() * _power_of_two(mantissa - exponent)).round().int()
    sign = torch.signbit(values).int() << {1: 3, 3: 7}[mantissa]
    return (steps + (exponent - lowest << mantissa) | sign).to(torch.uint8)


def _exponent(values: Tensor) -> Tensor:
    """The floor of the logarithm to base 2; -127 of what is below 2^-126, 128 of what is not finite."""
    return (values.view(torch.int32) >> 23 & 255) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exact, which exp2 is not everywhere. Exponents are cut to those of float32's normal numbers."""
    return (exponent.clamp(-126, 127) + 127 << 23).view(torch.float32)
