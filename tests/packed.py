"""Random weights in every packed format."""

from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor

from torch_moe_metal import packing


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
        sizes = packing.packed(shape, self.format, self.bits, self.group, self.scale)
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


AFFINE = {bits: Packing("affine", bits, 64) for bits in packing.BITS}
MXFP4 = Packing("mxfp4", 4, packing.MXFP4_GROUP, torch.uint8)
FP8 = Packing("fp8", 8, packing.FP8_BLOCK)
PACKINGS = [*AFFINE.values(), MXFP4, FP8]
