"""Random weights in every packed format, with float32 scales if a format has a choice."""

from gguf import GGMLQuantizationType

from torch_moe_metal.formats import BITS
from torch_moe_metal.random_weights import FORMATS, Packing

__all__ = ["AFFINE", "FP8", "MXFP4", "PACKINGS", "Packing", "gguf_type"]

AFFINE: dict[int, Packing] = {bits: FORMATS[f"affine{bits}"] for bits in BITS}
MXFP4, FP8 = FORMATS["mxfp4"], FORMATS["fp8"]
PACKINGS = [*AFFINE.values(), MXFP4, FP8]


def gguf_type(format: str) -> GGMLQuantizationType:
    """The `gguf` package's type of one of our formats."""
    return GGMLQuantizationType[format.removeprefix("ggml_").upper()]
