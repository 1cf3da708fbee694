"""GGML's formats: blocks of 32 or 256 columns that contain their scales. This module decodes the bytes of a block.

Each decoder gets blocks [..., bytes] and their float16 factors [..., 1]. It returns scale and offset [..., groups] and
integers [..., columns]; the values are scale * integer + offset. Products are exact in float32, so only one rounding is
left, and the results are bitwise equal to `dequantize` of the `gguf` package.
"""

import torch
from torch import Tensor

from .formats import Format

Decoded = tuple[Tensor, Tensor | None, Tensor]

#: The values of iq4's 4 bits, and those of ggml_mxfp4, which are e2m1 times 2.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(data: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """The values of rows of blocks: uint8 [..., bytes of the row] -> [..., C]. dtype is float32 or wider."""
    scale, offset, integers = decoded(data, format, dtype)
    return (integers * scale if offset is None else integers * scale + offset).flatten(-3)


def decoded(data: Tensor, format: Format, dtype: torch.dtype) -> Decoded:
    """Scale and offset [..., blocks, groups, 1], and integers [..., blocks, groups, columns of a group]."""
    blocks = data.unflatten(-1, (-1, format.bytes))
    decode, *positions = DECODERS[format.name]
    factors = (blocks[..., at : at + 2].clone().view(torch.float16).to(dtype) for at in positions)
    scale, offset, integers = decode(blocks, *factors)
    integers = integers.to(dtype).unflatten(-1, (scale.shape[-1], -1))
    return scale.unsqueeze(-1), None if offset is None else offset.unsqueeze(-1), integers


def fields(data: Tensor, bits: int, size: int) -> Tensor:
    """Integers of 1, 2 or 4 bits, as int16. Of each `size` bytes, the lowest bits come first, then the next bits, and
    so on."""
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8).unsqueeze(-1)
    return (data.unflatten(-1, (-1, 1, size)) >> shifts & 2**bits - 1).flatten(-3).to(torch.int16)


def looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, device=codes.device)[codes.int()]


def power_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2^(exponent - bias) of bytes, in float32. exp2 is not exact on every device."""
    return torch.tensor([2.0 ** (e - bias) for e in range(256)], device=exponents.device)[exponents.int()]


def _q4_0(block: Tensor, scale: Tensor) -> Decoded:
    return scale, None, fields(block[..., 2:], 4, 16) - 8


def _q4_1(block: Tensor, scale: Tensor, offset: Tensor) -> Decoded:
    return scale, offset, fields(block[..., 4:], 4, 16)


def _q5_0(block: Tensor, scale: Tensor) -> Decoded:
    return scale, None, (fields(block[..., 6:], 4, 16) | fields(block[..., 2:6], 1, 1) << 4) - 16


def _q5_1(block: Tensor, scale: Tensor, offset: Tensor) -> Decoded:
    return scale, offset, fields(block[..., 8:], 4, 16) | fields(block[..., 4:8], 1, 1) << 4


def _q8_0(block: Tensor, scale: Tensor) -> Decoded:
    return scale, None, block[..., 2:].view(torch.int8)


def _q2_k(block: Tensor, scale: Tensor, least: Tensor) -> Decoded:
    scales = block[..., :16]
    return scale * (scales & 15), -(least * (scales >> 4)), fields(block[..., 16:80], 2, 32)


def _q3_k(block: Tensor, scale: Tensor) -> Decoded:
    scales = (fields(block[..., 96:104], 4, 8) | fields(block[..., 104:108], 2, 4) << 4) - 32
    return scale * scales, None, (fields(block[..., 32:96], 2, 32) | fields(block[..., :32], 1, 32) << 2) - 4


def _of_eight_groups(block: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets from 12 bytes with 6 bits for each. The first 4 bytes hold the first four scales, the next
    4 the first four offsets, and the last 4 the low bits of the other scales and offsets; their high bits are in the
    upper bits of the first 8 bytes."""
    first, second, low = block[..., 4:16].split(4, -1)
    scales = torch.cat([first & 63, low & 15 | first >> 2 & 48], -1)
    leasts = torch.cat([second & 63, low >> 4 | second >> 2 & 48], -1)
    return scale * scales, -(least * leasts)


def _q4_k(block: Tensor, *factors: Tensor) -> Decoded:
    return *_of_eight_groups(block, *factors), fields(block[..., 16:], 4, 32)


def _q5_k(block: Tensor, *factors: Tensor) -> Decoded:
    return *_of_eight_groups(block, *factors), fields(block[..., 48:], 4, 32) | fields(block[..., 16:48], 1, 32) << 4


def _q6_k(block: Tensor, scale: Tensor) -> Decoded:
    integers = (fields(block[..., :128], 4, 64) | fields(block[..., 128:192], 2, 32) << 4) - 32
    return scale * block[..., 192:208].view(torch.int8), None, integers


def _iq4_nl(block: Tensor, scale: Tensor) -> Decoded:
    return scale, None, looked_up(IQ4, fields(block[..., 2:], 4, 16))


def _iq4_xs(block: Tensor, scale: Tensor) -> Decoded:
    scales = (fields(block[..., 4:8], 4, 1) | fields(block[..., 2:4], 2, 1) << 4) - 32
    return scale * scales, None, looked_up(IQ4, fields(block[..., 8:], 4, 16))


def _mxfp4(block: Tensor) -> Decoded:
    """Unlike in the format mxfp4, an exponent of 255 is not NaN."""
    return power_of_two(block[..., :1], 128), None, looked_up(E2M1, fields(block[..., 1:], 4, 16))


#: The decoder of each format, and the positions of the float16 factors in a block: a scale, and sometimes an offset.
DECODERS: dict = {
    "q4_0": (_q4_0, 0),
    "q4_1": (_q4_1, 0, 2),
    "q5_0": (_q5_0, 0),
    "q5_1": (_q5_1, 0, 2),
    "q8_0": (_q8_0, 0),
    "q2_k": (_q2_k, 80, 82),
    "q3_k": (_q3_k, 108),
    "q4_k": (_q4_k, 0, 2),
    "q5_k": (_q5_k, 0, 2),
    "q6_k": (_q6_k, 208),
    "iq4_nl": (_iq4_nl, 0),
    "iq4_xs": (_iq4_xs, 0),
    "ggml_mxfp4": (_mxfp4,),
}
