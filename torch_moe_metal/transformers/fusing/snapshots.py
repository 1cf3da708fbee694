"""`snapshot` and `restore`: a cache goes back to an earlier length, also where layers keep a recurrent state.

Keys and values of full attention are cropped, and are not copied. What cannot be cropped is copied: recurrent states,
the last inputs of convolutions, and the keys and values of sliding windows.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cache import OURS as GROWING_ONLY
from .linear_cache import OURS as LINEAR_ONLY
from .linear_cache import GrowingLinearLayer


@dataclass(frozen=True)
class Kept:
    """Of one layer: its length, or copies."""

    kind: str  # "cropped", "window", "linear" or "none"
    length: int = 0
    copies: tuple[Tensor | None, ...] = ()

    def shapes(self) -> list[tuple[int, ...] | None]:
        return [None if tensor is None else tuple(tensor.shape) for tensor in self.copies]


@dataclass(frozen=True)
class Snapshot:
    """What `restore` needs to make a cache what it was. It does not change with the cache."""

    layers: tuple[Kept, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for kept in self.layers for tensor in kept.copies if tensor is not None)


def snapshot(cache: Cache) -> Snapshot:
    """The present state of a cache of transformers, to `restore` it later.

    Only what cannot be cropped is copied: recurrent states, the last inputs of convolutions, and sliding windows.
    """
    return Snapshot(tuple(map(keep, layers_of(cache, "snapshot"))))


def restore(cache: Cache, snapshot: Snapshot) -> None:
    """Make `cache` what it was at `snapshot`. It must have the same first tokens as then: the cache itself, or a copy,
    after any number of further tokens. If it raises, the cache is unchanged. A snapshot can be restored many times.
    """
    layers = layers_of(cache, "restore")
    if len(layers) != len(snapshot.layers):
        raise ValueError(
            f"torch_moe_metal.restore: expected a cache of {len(snapshot.layers)} layers, got {len(layers)}"
        )
    for i, (layer, kept) in enumerate(zip(layers, snapshot.layers, strict=True)):
        reason = why_not(layer, kept)
        if reason is not None:
            raise ValueError(f"torch_moe_metal.restore: layer {i}: {reason}")
    for layer, kept in zip(layers, snapshot.layers, strict=True):
        put_back(layer, kept)


def can_crop(cache: Cache) -> bool:
    """Whether the cache can go back to any length without a snapshot."""
    return all(kind_of(layer) in ("cropped", "none") for layer in cache.layers)


def fork(cache: DynamicCache, length: int, snapshot: Snapshot | None) -> DynamicCache:
    """A copy of the first `length` tokens of a cache. `snapshot` is the one of this length, if the cache cannot be
    cropped to it."""
    copied = copy.copy(cache)
    kept = snapshot.layers if snapshot else [Kept(kind_of(layer), length) for layer in cache.layers]
    copied.layers = [fork_layer(layer, each) for layer, each in zip(cache.layers, kept, strict=True)]
    return copied


def fork_layer(layer, kept: Kept):
    """A copy of a layer, as transformers' own class."""
    cls = getattr(layer, "original", type(layer))
    ours = (*GROWING_ONLY, *LINEAR_ONLY)
    copied = cls.__new__(cls)
    copied.__dict__ |= {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(layer).items()
        if name not in ours
    }
    if kept.kind == "cropped":
        for name in ("keys", "values") if layer.is_initialized else ():
            setattr(copied, name, getattr(layer, name)[..., : kept.length, :].clone())
        for name, value in indexer_rows(layer, kept.length).items():
            setattr(copied, name, value.clone())
    elif kept.kind == "window":
        put_back(copied, kept)
    elif kept.kind == "linear":
        half = len(kept.copies) // 2
        for name, copies in (("conv_states", kept.copies[:half]), ("recurrent_states", kept.copies[half:])):
            setattr(copied, name, {i: None if each is None else each.clone() for i, each in enumerate(copies)})
    return copied


def indexer_rows(layer, length: int) -> dict[str, Tensor]:
    """What layers with sparse attention keep as well."""
    if not getattr(layer, "is_indexer_initialized", False):
        return {}
    rows = {"indexer_keys": layer.indexer_keys[:, :length]}
    positions = layer.indexer_position_ids
    return rows if positions is None else rows | {"indexer_position_ids": positions[..., :length]}


def rows_of(cache: DynamicCache, length: int) -> list[dict[str, Tensor]]:
    """Of each layer, views of what belongs to the first `length` tokens, by its names. What cannot be cropped is in
    snapshots."""
    found = []
    for layer in cache.layers:
        rows = kind_of(layer) == "cropped" and layer.is_initialized
        found.append({name: getattr(layer, name)[..., :length, :] for name in ("keys", "values")} if rows else {})
        found[-1] |= indexer_rows(layer, length)
    return found


def fill(cache: DynamicCache, rows: list[dict[str, Tensor]], snapshot: Snapshot | None) -> None:
    """Give a new cache what `rows_of` another one were, and its snapshot of the same length, if it has one."""
    kept = snapshot.layers if snapshot else [None] * len(rows)
    for layer, own, state in zip(cache.layers, rows, kept, strict=True):
        if state is not None and state.kind != kind_of(layer):
            raise ValueError(f"torch_moe_metal: expected a layer of the kind {state.kind}, got {kind_of(layer)}")
        if "keys" in own:
            layer.lazy_initialization(own["keys"], own["values"])
        if "indexer_keys" in own:
            layer.lazy_initialization_indexer(own["indexer_keys"])
        for name, value in own.items():
            setattr(layer, name, value)
        if state is not None and any(each is not None for each in state.copies):
            fill_state(layer, state)


def fill_state(layer, kept: Kept) -> None:
    if kept.kind == "window":
        layer.lazy_initialization(*kept.copies)
    else:
        half = len(kept.copies) // 2
        for name, copies in (("conv_states", kept.copies[:half]), ("recurrent_states", kept.copies[half:])):
            for i, state in enumerate(copies):
                layer.lazy_initialization(**{name: state}, state_idx=i)
    put_back(layer, kept)


def tensors_of(cache: Cache) -> Iterator[Tensor]:
    """All tensors of a cache."""
    for layer in cache.layers:
        if getattr(layer, "room", None) is not None:
            yield from layer.room.memory()
        for value in vars(layer).values():
            held = value.values() if isinstance(value, dict) else (value,)
            yield from (each for each in held if isinstance(each, Tensor))


def layers_of(cache: Cache, caller: str) -> list:
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, Cache) or layers is None:
        raise TypeError(f"torch_moe_metal.{caller}: expected a cache of transformers, got {type(cache).__name__}")
    for layer in layers:
        if kind_of(layer) is None:
            raise TypeError(f"torch_moe_metal.{caller}: no support for a layer of class {type(layer).__name__}")
    return layers


def kind_of(layer: object) -> str | None:
    """Which way leads back, or None."""
    if isinstance(layer, DummyLayer):
        return "none"
    if type(layer) in (LinearAttentionLayer, GrowingLinearLayer):
        return "linear"
    if isinstance(layer, LinearAttentionLayer | StaticSlidingWindowLayer):
        return None
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "window"
    return "cropped" if isinstance(layer, DynamicLayer | StaticLayer) and layer.is_croppable else None


def keep(layer) -> Kept:
    kind = kind_of(layer)
    if kind == "linear":
        return Kept(kind, int(any(layer.has_previous_state.values())), tuple(copies_of(layer)))
    if kind == "window":
        shown = (layer.keys, layer.values) if layer.is_initialized else (None, None)
        return Kept(kind, layer.cumulative_length, tuple(None if each is None else each.clone() for each in shown))
    return Kept(kind) if kind == "none" else Kept(kind, int(layer.get_seq_length()))


def copies_of(layer: LinearAttentionLayer) -> list[Tensor | None]:
    """The inputs of its convolutions, and its recurrent states."""
    inputs = list(layer.conv_states.values())
    if isinstance(layer, GrowingLinearLayer):
        return [None if each is None else each.clone() for each in inputs] + [layer.latest_state()]
    return [None if each is None else each.clone() for each in (*inputs, *layer.recurrent_states.values())]


def why_not(layer, kept: Kept) -> str | None:
    """The reason why this layer cannot go back to what was kept, or None."""
    kind = kind_of(layer)
    if kind != kept.kind:
        return f"expected a layer like the one of the snapshot, got one of class {type(layer).__name__}"
    now = keep(layer) if kind == "linear" and kept.length else kept
    if kind == "linear" and kept.shapes() != now.shapes():
        return f"expected states of shapes {kept.shapes()}, got {now.shapes()}"
    length = (
        layer.cumulative_length if kind == "window" else layer.get_seq_length() if kind == "cropped" else kept.length
    )
    return f"expected at least {kept.length} tokens, got {int(length)}" if length < kept.length else None


def put_back(layer, kept: Kept) -> None:
    if kept.kind == "linear":
        put_back_states(layer, kept)
    elif kept.kind == "window":
        if kept.copies[0] is None:
            layer.reset()
            return
        layer.keys, layer.values = (each.clone() for each in kept.copies)
        layer.cumulative_length = kept.length
    elif kept.kind == "cropped" and layer.get_seq_length() > kept.length:
        if kept.length:
            layer.crop(kept.length - int(layer.get_seq_length()))
        else:
            layer.reset()


def put_back_states(layer: LinearAttentionLayer, kept: Kept) -> None:
    """The tensors of other layers than ours stay the same, since compiled graphs may know them."""
    if not kept.length:
        if any(layer.has_previous_state.values()):
            layer.reset()
        return
    if isinstance(layer, GrowingLinearLayer):
        layer.forget()
    half = len(kept.copies) // 2
    for states, copies in ((layer.conv_states, kept.copies[:half]), (layer.recurrent_states, kept.copies[half:])):
        for i, state in enumerate(copies):
            if isinstance(layer, GrowingLinearLayer):
                states[i] = None if state is None else state.clone()
            elif state is not None:
                states[i].copy_(state)
    for i in layer.has_previous_state:
        layer.has_previous_state[i] = True
