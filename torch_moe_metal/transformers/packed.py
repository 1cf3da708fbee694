"""Modules of transformers with packed weights: experts that keep their class, and our layers in place of linear ones.

This is the one place that knows how a transformers module holds packed weights. What a checkpoint calls their parts is
kept, so that loading is renaming at most: a weight is told by the names of its data, its scale and, where the format
has one, its offset.

    pack_experts(experts, "mxfp4", {"gate_up": {"gate_up_proj_blocks": ..., "gate_up_proj_scales": ...}, "down": ...})
    replace(model, "lm_head", torch_moe_metal.nn.Linear.from_parts({"weight": ..., "scales": ..., "biases": ...}, ...))
"""

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..grad import warn_once
from ..layers import Packed, numbers
from .experts import NAME

#: What transformers' classes of experts call the weights that the ops call gate_up and down.
PROJECTIONS = {"gate_up": "gate_up_proj", "down": "down_proj"}
Parts = Mapping[str, Tensor]  # data, scale and offset of one weight, by their names in the module


class PackedExperts(Packed):
    """What the classes of experts with packed weights share. They are subclasses of the experts' own class."""

    original: type  # the class that this module had before
    format: str

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = self.config._experts_implementation
        if chosen == NAME:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        warn_once(
            f"{type(self).__name__} runs on {chosen!r}, which cannot read {self.format}: its weights are dequantised "
            f'at every call. model.set_experts_implementation("{NAME}") runs them as they are'
        )
        return self.original.forward(self.dequantized(hidden_states.dtype), hidden_states, top_k_index, top_k_weights)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """A stand-in of the original class with dense weights of this dtype. All else is this module's own."""
        dense = self.original.__new__(self.original)
        dense.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "packing"}
        dense._parameters = dict(self._parameters)
        dense._buffers = {name: value for name, value in self._buffers.items() if name not in packed_names(self)}
        for weight, name in PROJECTIONS.items():
            parts = self.parts(weight)
            of_row = parts[0].new_empty(0, self.columns[weight], dtype=dtype)
            unpacked = numbers(*parts, self.format, of_row)
            dense._parameters[name] = unpacked.mT if self.is_transposed else unpacked
        return dense

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"format={self.format}")))

    def __reduce_ex__(self, protocol):
        # These classes are made at run time, so a copy is made from the original class.
        return rebuild, (self.original,), self.__dict__


def rebuild(original: type) -> nn.Module:
    cls = packed_class(original)
    return cls.__new__(cls)


@functools.cache
def packed_class(original: type) -> type:
    """It keeps its name and its home, by which blocks and device maps know it."""
    own = {"original": original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (PackedExperts, original), own)


def packed_names(module: Packed) -> set[str]:
    return {name for names in module.packing.values() for name in names}


def packed_modules(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """All modules of a model that hold packed weights, with their names."""
    return ((name, module) for name, module in model.named_modules() if getattr(module, "packing", None))


def weight_shape(experts: nn.Module, weight: str) -> tuple[int, int, int]:
    """[E, N, C] of dense experts' gate_up [E, 2I, H] or down [E, H, I], whichever way they lie."""
    E, N, C = getattr(experts, PROJECTIONS[weight]).shape
    return (E, C, N) if experts.is_transposed else (E, N, C)


def pack_experts(experts: nn.Module, format: str, weights: Mapping[str, Parts]) -> None:
    """Have these packed weights, {"gate_up": ..., "down": ...}, in place of the dense ones: rows [E, N, C] as the ops
    read them, whatever the dense ones were. While a checkpoint is loaded they are on the meta device."""
    experts.columns = {weight: weight_shape(experts, weight)[2] for weight in PROJECTIONS}
    for name in PROJECTIONS.values():
        del experts._parameters[name]
    experts.__class__ = packed_class(type(experts))
    experts.format = format
    for weight, parts in weights.items():
        experts.hold(weight, parts)
    experts._is_hf_initialized = True  # transformers' initialisation knows dense weights alone


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Have this layer in the place of another."""
    layer.train(model.get_submodule(name).training)
    layer._is_hf_initialized = True
    model.set_submodule(name, layer)
