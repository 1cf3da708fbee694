"""Random weights in packed formats. Their bytes are random, because quantising a layer takes longer than measuring
it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2, prod

import torch
from torch import Tensor

from . import formats, ggml, reference
from .arguments import Parts, scale_names, weights
from .packing import WRITTEN, packed_sizes, quantize


@dataclass(frozen=True)
class Packing:
    """A format with its bits, group size and scale dtype. Its random values are about as large as trained weights."""

    format: str
    bits: int
    group: int
    scale: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = f"affine{self.bits}-g{self.group}" if self.row.is_affine else self.format
        return name if self.scale in (torch.float32, torch.uint8) else f"{name}-{str(self.scale)[6:]}"

    @property
    def row(self) -> formats.Format:
        return formats.FORMATS[self.format]

    @property
    def whole_columns(self) -> int:
        """The number of columns must be a multiple of this."""
        return self.group if self.row.is_affine else self.row.whole_columns

    def of(self, dense: Tensor, generator: torch.Generator) -> Parts:
        """A weight packed by `quantize`, or random values if `quantize` cannot write them: it writes nvfp4 without a
        factor."""
        if self.format in WRITTEN and self.row.offset != "factor":
            return quantize(dense, self.format, self.bits, self.group)
        return self.weight(*dense.shape, generator=generator)

    def weight(self, *shape: int, generator: torch.Generator) -> Parts:
        """data, scale and offset of a random weight [..., N, C] with a variance of about 1 / C."""
        sizes = packed_sizes(shape, self.format, self.bits, self.group, self.scale)
        row, size, device = self.row, shape[-1] ** -0.5, generator.device

        def noise(shape: tuple[int, ...]) -> Tensor:  # around 1
            return torch.rand(shape, generator=generator, device=device) * 0.5 + 0.75

        def integers(name: str, low: int, high: int) -> Tensor:
            return torch.randint(low, high, sizes[name][0], generator=generator, device=device, dtype=torch.uint8)

        def powers(size: float, shape: tuple[int, ...]) -> Tensor:  # e8m0
            return (torch.randint(-1, 2, shape, generator=generator, device=device) + 127 + round(log2(size))).byte()

        data = integers("data", 0, 256)
        if row.has_own_scales:
            blocks, size = data.unflatten(-1, (-1, row.bytes)), size / root_mean_square(self.format)
            for factor, at in factors(row):
                part = blocks[..., at : at + 2]
                part.copy_((noise((*part.shape[:-1], 1)) * factor * size).half().view(torch.uint8))
            if not factors(row):
                blocks[..., 0] = powers(2 * size, blocks.shape[:-1])
            return data, None, None
        if row.is_affine:
            scale = (noise(sizes["scale"][0]) * size * 3.5 / 2**self.bits).to(self.scale)
            offset = (scale.float() * noise(scale.shape) * -(2 ** (self.bits - 1))).to(self.scale)
            return data.view(torch.int32) if data.shape[-1] % 4 == 0 else data, scale, offset
        if row.bits == 8:
            data, size = torch.where(data & 127 == 127, data - 1, data), size / 128  # no NaN
        if row.scale == "e8m0":
            return data, powers(size if row.bits == 8 else size / 4, sizes["scale"][0]), None
        if row.scale == "e4m3":  # 0.5 to 1.9
            return data, integers("scale", 48, 64), noise((*shape[:-2], 1)) * size / 3
        return data, (noise(sizes["scale"][0]) * size).to(self.scale), None

    def bytes(self, *shape: int) -> int:
        """Bytes of data, scale and offset of such a weight."""
        parts = packed_sizes(shape, self.format, self.bits, self.group, self.scale).values()
        factors = 4 * prod(shape[:-2]) if self.row.offset == "factor" else 0
        return factors + sum(prod(size) * dtype.itemsize for size, dtype in parts)


def factors(row: formats.Format) -> list[tuple[float, int]]:
    """The float16 factors of one of GGML's blocks: the size relative to the first factor, and the position. Offsets
    move the middle of the integers to 0; k-quants subtract them."""
    positions = ggml.DECODERS[row.name][1:]
    middle = (2**row.bits - 1) / 2
    return list(zip((1.0, middle if row.columns == 256 else -middle), positions, strict=False))


@functools.cache
def root_mean_square(format: str) -> float:
    """The root mean square of GGML's blocks whose first factor is 1 and whose other bytes are random."""
    row = formats.FORMATS[format]
    blocks = torch.randint(256, (256, row.bytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for factor, at in factors(row):
        blocks[:, at : at + 2] = torch.tensor([factor], dtype=torch.float16).view(torch.uint8)
    if not factors(row):
        blocks[:, 0] = 128
    return float(reference.dequantize(blocks, format=format, dtype=torch.float32).square().mean().sqrt())


#: The values of `--formats`. Scales and offsets of affine get the activations' dtype.
FORMATS: dict[str, Packing | None] = {
    library: Packing(row.name, row.bits, row.scale_columns or 64, row.scale_dtype or torch.float32)
    if row.is_packed
    else None
    for library, row in formats.LIBRARIES.items()
}


def packing_of(format: str, dtype: torch.dtype) -> Packing | None:
    """None for dense weights."""
    packing = FORMATS[format]
    return replace(packing, scale=dtype) if packing and packing.row.is_affine else packing


def dequantized(op: str, given: Mapping[str, Tensor], packing: Packing, dtype: torch.dtype) -> dict[str, Tensor]:
    """An op's arguments with dense weights of the same values."""
    found = dict(given)
    for name in weights(op):
        parts = [found.pop(part, None) for part in (name, *scale_names(name))]
        options = {"format": packing.format, "bits": packing.bits, "dtype": dtype}
        found[name] = torch.ops.moe_metal.dequantize(*parts, **options)
    return found
