"""Makes the fused class of a class of transformers, from what its family's record says."""

import functools

from torch import nn

from .attention_blocks import FusedAttention, FusedGemma4Attention, FusedLatentAttention
from .families import RECORDS, class_name
from .fused import Fused
from .layers import FusedGemma4Layer, FusedNorm, FusedPreNormLayer
from .linear_blocks import FusedLinearAttention, FusedMamba2, FusedShortConv
from .moe_blocks import FusedBlock, FusedLlama4Block, FusedMlp
from .records import (
    Attention,
    Block,
    Gemma4Attention,
    Gemma4Layer,
    LatentAttention,
    Layer,
    LinearAttention,
    Llama4Block,
    Mamba2,
    Mlp,
    Norm,
    Record,
    ShortConv,
)

#: What the fused classes of each kind inherit, before the original class.
BASES: dict[type[Record], type[Fused]] = {
    Block: FusedBlock,
    Llama4Block: FusedLlama4Block,
    Mlp: FusedMlp,
    Attention: FusedAttention,
    Gemma4Attention: FusedGemma4Attention,
    LatentAttention: FusedLatentAttention,
    LinearAttention: FusedLinearAttention,
    Mamba2: FusedMamba2,
    ShortConv: FusedShortConv,
    Layer: FusedPreNormLayer,
    Gemma4Layer: FusedGemma4Layer,
    Norm: FusedNorm,
}


@functools.cache
def fused_class(original: type, selected: bool = False) -> type[Fused] | None:
    """The fused class of `original`, or None. It keeps the name of the original, which device maps contain."""
    record = RECORDS.get(class_name(original))
    if record is None:
        return None
    base = BASES[type(record)]
    homes = original.__module__, "torch.nn.modules.linear", *base.more_homes
    own = {"record": record, "original": original, "selected": selected, "homes": homes, "__reduce_ex__": reduced}
    own |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (base, original), own)


def reduced(module: Fused, protocol: int) -> tuple:
    """For copies and pickles. These classes are made at run time, so a copy is made from the original class."""
    return rebuild, (module.original, module.selected), module.__dict__


def rebuild(original: type, selected: bool) -> nn.Module:
    cls = fused_class(original, selected) or original
    return cls.__new__(cls)
