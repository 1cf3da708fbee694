"""Packs weights into few bits. `reference.dequantize` defines the formats.

Plain PyTorch, for any device. C is the number of columns of a weight [..., N, C], which are packed along each row.
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import BITS, FORMATS, GROUPS, any_of

#: Columns with one scale in mxfp4; rows and columns with one scale in fp8.
MXFP4_GROUP, FP8_BLOCK = FORMATS["mxfp4"].scale_columns, FORMATS["fp8"].scale_rows
#: The prefix of GGML's codebook formats, which are not supported.
CODEBOOKS = ("iq1", "iq2", "iq3", "tq1", "tq2")
#: Values that are quantised at a time; each temporarily takes up to 80 bytes.
AT_ONCE = 1 << 19


def quantize(
    weight: Tensor, format: str = "affine", bits: int = 4, group_size: int = 64
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pack a weight [..., N, C] of float32, float16 or bfloat16. -> data, scale, offset

        data, scale, offset = torch_moe_metal.quantize(weight, "affine", bits=4, group_size=64)
        y = torch_moe_metal.linear(x, data, scale, offset, format="affine")

    affine: integers of 2, 3, 4, 5, 6 or 8 bits; each 16, 32, 64 or 128 columns have a scale and an offset in the
    weight's dtype, bitwise equal to mlx.core.quantize on the CPU. mxfp4: floats of 4 bits; each 32 columns have a power
    of two as scale. fp8: e4m3; each block of 128 x 128 has a float32 scale. mxfp8: e4m3; each 32 columns have a power
    of two. nvfp4: floats of 4 bits; each 16 columns have an e4m3 scale, up to 448. mxfp8 and nvfp4 equal
    mlx.core.quantize of float32 weights. q4_0 and q8_0: integers of 4 and 8 bits; each block of 32 columns contains a
    float16 scale, bitwise equal to gguf.quants.quantize.

    `bits` and `group_size` are options of affine, the only format with an offset; q4_0 and q8_0 have no separate scale.
    data is uint8, the bytes of the rows. A value that is not finite makes all values with the same scale NaN.
    """
    check(weight, format, bits, group_size)
    *leading, N, C = weight.shape
    row = FORMATS[format]
    sizes = packed_sizes((N, C), format, bits, group_size, weight.dtype)
    whole = {
        name: torch.empty(*leading, *size, dtype=dtype, device=weight.device) for name, (size, dtype) in sizes.items()
    }
    write = functools.partial(_affine, bits=bits, group_size=group_size) if row.is_affine else WRITERS[format]
    step = max(1, AT_ONCE // max(1, C * row.rows_per_scale)) * row.rows_per_scale
    for index in itertools.product(*map(range, leading)):
        for first in range(0, N, step):
            rows = weight[index][first : first + step].detach().float()
            for name, part in zip(whole, write(rows), strict=True):
                row_of_part = first // row.rows_per_scale if name == "scale" else first
                whole[name][index][row_of_part : row_of_part + len(part)] = part
    return whole["data"], whole.get("scale"), whole.get("offset")


def packed_sizes(
    size: tuple[int, ...], format: str, bits: int, group_size: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of data, scale and offset of a packed weight [..., N, C]. `dtype` is that of affine scales."""
    *leading, N, C = size
    row = FORMATS[format]
    columns = C * bits // 8 if row.is_affine else C // row.columns * row.bytes
    found = {"data": ((*leading, N, columns), torch.uint8)}
    if not row.has_own_scales:
        groups = -(-C // (row.scale_columns or group_size))
        found["scale"] = ((*leading, -(-N // row.rows_per_scale), groups), row.scale_dtype or dtype)
    if row.is_affine:
        found["offset"] = found["scale"]
    return found


def check(
    weight: Tensor, format: str, bits: int, group_size: int, caller: str = "quantize", name: str = "weight"
) -> None:
    """Raise if this weight cannot be packed like this. The message names `caller` and the argument `name`."""

    def expect(right: bool, name: str, what: str, got: object) -> None:
        if not right:
            raise ValueError(f"torch_moe_metal.{caller}: {name}: expected {what}, got {got}")

    floats = (torch.float32, torch.float16, torch.bfloat16)
    expect(format in WRITTEN, "format", f"one of {', '.join(WRITTEN)}", not_written(format))
    expect(weight.dtype in floats, name, "float32, float16 or bfloat16", str(weight.dtype).removeprefix("torch."))
    expect(weight.dim() >= 2, name, "shape [..., N, C]", list(weight.shape))
    row = FORMATS[format]
    group, reason = row.whole_columns, ""
    if row.is_affine:
        expect(bits in BITS, "bits", any_of(BITS), bits)
        expect(group_size in GROUPS, "group_size", any_of(GROUPS), group_size)
        group, reason = group_size, ", its group_size"
    expect(weight.shape[-1] % group == 0, name, f"a multiple of {group} columns{reason}", list(weight.shape))


def not_written(format: object) -> str:
    """Describes a format that `quantize` does not support, with the reason."""
    if isinstance(format, str) and format in FORMATS:
        return f"{format!r}, which is read, but not written"
    if isinstance(format, str) and format.lower().startswith(CODEBOOKS):
        return f"{format!r}, a codebook, which is not supported"
    return repr(format)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers of `bits` bits (uint8, at least eight in a row) into bytes: the inverse of
    `reference.unpack`."""
    if bits == 8:
        return codes
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    each_bit = (codes.unsqueeze(-1) >> shifts[:bits] & 1).flatten(-2)
    return (each_bit.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8)


def _affine(rows: Tensor, bits: int, group_size: int) -> tuple[Tensor, ...]:
    """MLX's rule: zero and the end of the group's range with the larger magnitude are exact."""
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
    """The smallest power of two for which the largest value of a group is at most 6, the maximum of e2m1."""
    groups = rows.unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponent = _exponent(largest)
    exponent = (exponent - 2 + (largest * _power_of_two(-exponent) > 1.5).int()).clamp(min=-127)
    codes = _nearest_code((groups * _power_of_two(-exponent)).nan_to_num(0.0, 0.0, 0.0), 1, 0)
    return pack(codes.flatten(-2), 4), _e8m0(exponent, largest)


def _mxfp8(rows: Tensor) -> tuple[Tensor, ...]:
    """MLX's rule: the smallest power of two for which the largest value of a group is at most 448, the maximum of
    e4m3; 1 if all are zero."""
    groups = rows.unflatten(-1, (-1, FORMATS["mxfp8"].scale_columns))
    largest = groups.abs().amax(-1, keepdim=True)
    ratio = largest / 448
    exponent = _exponent(ratio) + (ratio.view(torch.int32) & 0x7FFFFF != 0).int()
    exponent = exponent.clamp(min=-127).masked_fill(largest == 0, 0)
    codes = _nearest_code((groups * _power_of_two(-exponent)).nan_to_num(0.0, 0.0, 0.0), 3, -6)
    return codes.flatten(-2), _e8m0(exponent, largest)


def _e8m0(exponent: Tensor, largest: Tensor) -> Tensor:
    return (exponent + 127).masked_fill(~largest.isfinite(), 255).squeeze(-1)


def _nvfp4(rows: Tensor) -> tuple[Tensor, ...]:
    """MLX's rule: a sixth of a group's largest value, rounded to e4m3; ties go to the value nearer to 0."""
    groups = rows.unflatten(-1, (-1, FORMATS["nvfp4"].scale_columns))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = _nearest_code((largest / 6).nan_to_num(0.0).clamp(max=448), 3, -6)
    # The values of e4m3's 256 codes. Some devices do not support PyTorch's float8.
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    quotients = groups / values.to(scale.device)[scale.int()]
    codes = _nearest_code(quotients.nan_to_num(0.0, 0.0, 0.0).clamp(-6, 6), 1, 0, lambda steps: (steps - 0.5).ceil())
    codes = codes.masked_fill(codes == 8, 0)  # no negative zero
    return pack(codes.flatten(-2), 4), scale.masked_fill(~largest.isfinite(), 127).squeeze(-1)


def _q4_0(rows: Tensor) -> tuple[Tensor, ...]:
    """GGML's rule: the first of a block's largest values becomes -8."""
    blocks = rows.unflatten(-1, (-1, FORMATS["q4_0"].columns))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = ((blocks * _inverse(scale)).nan_to_num(0.0) + 8.5).clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (torch.cat([scale.half().view(torch.uint8), low | high << 4], -1).flatten(-2),)


def _q8_0(rows: Tensor) -> tuple[Tensor, ...]:
    """GGML's rule: a block's largest value becomes 127, and halves are rounded away from 0."""
    blocks = rows.unflatten(-1, (-1, FORMATS["q8_0"].columns))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = (blocks * _inverse(scale)).nan_to_num(0.0)
    whole = steps.trunc()
    codes = whole + ((steps - whole).abs() >= 0.5) * steps.sign()
    codes = codes.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    return (torch.cat([scale.half().view(torch.uint8), codes], -1).flatten(-2),)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _fp8(rows: Tensor) -> tuple[Tensor, ...]:
    """A block's largest value becomes 448, the maximum of e4m3."""
    N, C = rows.shape
    blocks = F.pad(rows.abs(), (0, -C % FP8_BLOCK, 0, -N % FP8_BLOCK))
    blocks = blocks.unflatten(-1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = blocks.amax((1, 3)) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    of_each = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:N, :C]
    return _nearest_code((rows / of_each).nan_to_num(0.0, 0.0, 0.0), 3, -6), scale


def _nearest_code(
    values: Tensor, mantissa: int, lowest: int, rounded: Callable[[Tensor], Tensor] = torch.round
) -> Tensor:
    """The codes of the nearest floats of few bits; ties go to the even code. `lowest` is the exponent of
    subnormals."""
    exponent = _exponent(values).clamp(min=lowest)
    steps = rounded(values.abs() * _power_of_two(mantissa - exponent)).int()
    sign = torch.signbit(values).int() << {1: 3, 3: 7}[mantissa]
    return (steps + (exponent - lowest << mantissa) | sign).to(torch.uint8)


def _exponent(values: Tensor) -> Tensor:
    """The floor of the logarithm to base 2; -127 for values below 2^-126, 128 for values that are not finite."""
    return (values.view(torch.int32) >> 23 & 255) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    """An exact power of two, which exp2 does not give everywhere. Exponents are clamped to those of normal
    float32."""
    return (exponent.clamp(-126, 127) + 127 << 23).view(torch.float32)


#: The encoder of each format except affine: rows of float32 -> data and, if the format has one, scale.
WRITERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "q4_0": _q4_0,
    "q8_0": _q8_0,
}
#: The formats that `quantize` supports.
WRITTEN = ("affine", *WRITERS)
