"""Which layer of a cache a fused mixer uses, and how it uses layers that are not ours."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from .linear_cache import GrowingLinearLayer, Sizes, Step, alike, new_state


def step_in(cache: Cache, index: int, x: Tensor, sizes: Sizes) -> Step | None:
    """A call of the mixer of this layer, or None if transformers' own forward must run."""
    layers = getattr(cache, "layers", ())
    if index is None or index >= len(layers):
        return None
    layer, traced = layers[index], torch.compiler.is_compiling() or torch.jit.is_tracing()
    plain = type(cache) is DynamicCache and not cache.offloading
    if not traced and (plain or getattr(layer, "record_past", False)):
        grow(layer)
    if type(layer) is GrowingLinearLayer and not traced:
        return layer.step(x, sizes) if layer.fits(x, sizes) else None
    if type(layer) not in (LinearAttentionLayer, GrowingLinearLayer) or layer.record_past:
        return None
    return step_in_place(layer, x, sizes)


def step_in_place(layer: LinearAttentionLayer, x: Tensor, sizes: Sizes) -> Step | None:
    """A call with a layer whose tensors stay the same: of a static cache, or in a compiled graph."""
    continues, kept = layer.has_previous_state[0], x.new_empty(len(x), sizes.taps, sizes.channels)
    if not layer.is_conv_states_initialized[0]:
        layer.lazy_initialization(conv_states=kept.mT, state_idx=0)
    if sizes.heads and not layer.is_recurrent_states_initialized[0]:
        layer.lazy_initialization(recurrent_states=new_state(x, sizes), state_idx=0)
    inputs, state = layer.conv_states[0], layer.recurrent_states[0]
    if inputs.shape != kept.mT.shape or not alike(inputs, x, x.dtype) or inputs.requires_grad:
        return None
    if (state is None) == bool(sizes.heads):
        return None
    if state is not None:
        if state.shape != (len(x), *sizes.state()) or not alike(state, x, torch.float32) or state.requires_grad:
            return None
        if not continues:
            state.zero_()
        state = state.mT if sizes.transposed else state

    def done() -> None:
        inputs.copy_(kept.mT)
        layer.has_previous_state[0] = True

    return Step(inputs[..., 1:].mT if continues else None, kept, state, None, 0, continues, done)


def grow(layer: object) -> None:
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        layer.__class__ = GrowingLinearLayer


def leave(cache: Cache | None, index: int | None) -> None:
    """Before transformers' own forward of a mixer. A layer that records becomes ours even then, since transformers'
    `crop` would not restore its recurrent state, and ours raises."""
    layers = getattr(cache, "layers", ())
    if index is None or index >= len(layers) or torch.compiler.is_compiling():
        return
    if getattr(layers[index], "record_past", False):
        grow(layers[index])
    if type(layers[index]) is GrowingLinearLayer:
        layers[index].leave()
