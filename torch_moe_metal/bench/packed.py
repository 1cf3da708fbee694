"""Random weights in packed formats. Their bytes are random: quantising a layer takes longer than measuring it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2, prod

import torch
from torch import Tensor

from ..arguments import ARGUMENTS, beside
from ..formats import BITS
from ..packing import FP8_BLOCK, MXFP4_GROUP, packed


@dataclass(frozen=True)
class Packing:
    """A format with its numbers. Values are about as large as those of trained weights."""

    format: str
    bits: int
    group: int
    scale: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = f"affine{self.bits}-g{self.group}" if self.format == "affine" else self.format
        return name if self.scale in (torch.float32, torch.uint8) else f"{name}-{str(self.scale)[6:]}"

    def weight(self, *shape: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
        """data, scale and offset of a weight [..., N, C], whose values have a variance of about 1 / C."""
        sizes = packed(shape, self.format, self.bits, self.group, self.scale)
        size, device = shape[-1] ** -0.5, generator.device

        def noise() -> Tensor:  # around 1
            return torch.rand(sizes["scale"][0], generator=generator, device=device) * 0.5 + 0.75

        def integers(name: str, low: int, high: int) -> Tensor:
            return torch.randint(low, high, sizes[name][0], generator=generator, device=device, dtype=torch.uint8)

        data = integers("data", 0, 256)
        if self.format == "fp8":
            data = torch.where(data & 127 == 127, data - 1, data)  # no NaN
            return data, (noise() * size / 128).to(self.scale), None
        if self.format == "mxfp4":
            middle = 126 + round(log2(size))
            return data, integers("scale", middle - 1, middle + 2), None
        scale = (noise() * size * 3.5 / 2**self.bits).to(self.scale)
        offset = (scale.float() * noise() * -(2 ** (self.bits - 1))).to(self.scale)
        return data.view(torch.int32) if data.shape[-1] % 4 == 0 else data, scale, offset

    def bytes(self, *shape: int) -> int:
        """Of such a weight's data, scale and offset."""
        parts = packed(shape, self.format, self.bits, self.group, self.scale).values()
        return sum(prod(size) * dtype.itemsize for size, dtype in parts)


#: What `--formats` names. Scales and offsets of affine get the activations' dtype.
FORMATS: dict[str, Packing | None] = {
    "dense": None,
    **{f"affine{bits}": Packing("affine", bits, 64) for bits in BITS},
    "mxfp4": Packing("mxfp4", 4, MXFP4_GROUP, torch.uint8),
    "fp8": Packing("fp8", 8, FP8_BLOCK),
}


def packing_of(format: str, dtype: torch.dtype) -> Packing | None:
    """None of dense weights."""
    packing = FORMATS[format]
    return replace(packing, scale=dtype) if packing and packing.format == "affine" else packing


def dequantized(op: str, given: Mapping[str, Tensor], packing: Packing, dtype: torch.dtype) -> dict[str, Tensor]:
    """An op's arguments with dense weights of the same numbers."""
    found = dict(given)
    for name, argument in ARGUMENTS[op].items():
        if argument.kind == "weight":
            parts = [found.pop(part, None) for part in (name, *beside(name))]
            options = {"format": packing.format, "bits": packing.bits, "dtype": dtype}
            found[name] = torch.ops.moe_metal.dequantize(*parts, **options)
    return found
