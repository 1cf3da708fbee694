"""The KV cache of a patched model grows in place: a token's keys and values are written behind those that are there.

transformers' `DynamicCache` concatenates, which copies all that is stored for every token. Here a layer's keys and
values are rows of memory with room for more, and `layer.keys` and `layer.values` still show the rows stored.

A tensor that somebody took out of the cache keeps its numbers, but for one case: new tokens after `crop` overwrite the
rows that were cropped. A copy of a cache (deepcopy, pickle) shares nothing with it, and has transformers' own layers.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...grad import in_forward_mode


def rows_to_allocate(stored: int) -> int:
    """Fewer than `most_rows`, so that some rows may be cropped before the memory is too large and moves."""
    return stored + stored // 4 + 192


def most_rows(stored: int) -> int:
    return stored + stored // 4 + 256


class Room:
    """Memory [..., rows, width] for the keys of a layer, or for its values."""

    def __init__(self):
        self.memory: Tensor | None = None
        self.shown: Tensor | None = None  # what the layer holds: the last rows before `end`
        self.end = 0

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """The stored rows and the new ones behind them. If they fit, only the new ones are copied."""
        old, more = rows_of(stored), new.shape[-2]
        if self.memory is None or not self.fits(more, old + more):
            self.move(stored, new, old + more)
        self.memory.narrow(-2, self.end, more).copy_(new)
        self.end += more
        self.shown = self.memory.narrow(-2, self.end - old - more, old + more)
        return self.shown

    def fits(self, more: int, total: int) -> bool:
        """Memory of inference mode cannot be written outside of it."""
        writable = torch.is_inference_mode_enabled() or not self.memory.is_inference()
        return writable and self.end + more <= self.memory.shape[-2] <= most_rows(total)

    def move(self, stored: Tensor, new: Tensor, total: int) -> None:
        """To memory of its own, never within the old one: somebody may look at rows there."""
        self.memory = new.new_empty(*new.shape[:-2], rows_to_allocate(total), new.shape[-1])
        self.end = rows_of(stored)
        self.shown = self.memory.narrow(-2, 0, self.end)
        if self.end:
            self.shown.copy_(stored)

    def show(self, rows: Tensor) -> Tensor:
        """From now on the layer holds these rows of the memory, and those behind them are overwritten."""
        start = (rows.storage_offset() - self.memory.storage_offset()) // self.memory.stride(-2)
        self.shown, self.end = rows, start + rows.shape[-2]
        return rows

    def reorder(self, batch: Tensor) -> Tensor:
        """All of the memory, so that it is copied once, and not once more by the next token."""
        self.memory = self.memory.index_select(0, batch.to(self.memory.device))
        rows = rows_of(self.shown)
        self.shown = self.memory.narrow(-2, self.end - rows, rows)
        return self.shown


def rows_of(stored: Tensor) -> int:
    return stored.shape[-2] if stored.dim() > 1 else 0  # a layer begins with torch.tensor([])


def alike(stored: Tensor | None, new: Tensor) -> bool:
    """Whether `torch.cat` would do no more than put the rows behind one another."""
    if type(new) is not Tensor or new.dim() < 2:
        return False
    if stored is None:
        return True
    same_kind = type(stored) is Tensor and stored.dtype == new.dtype and stored.device == new.device
    if stored.dim() == 1:
        return same_kind and not stored.numel()
    return same_kind and stored.shape[:-2] == new.shape[:-2] and stored.shape[-1] == new.shape[-1]


class Growing(DynamicLayer):
    """What both kinds of layers share. Whatever is not said here, is transformers'."""

    original: type  # the class that this layer had before
    rooms: tuple[Room, Room] | None = None  # of keys and values

    def may_grow(self, keys: Tensor, values: Tensor) -> bool:
        """Not where a trace would hold the writing, or autograd the tensors that it writes beside."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_forward_mode():
            return False
        return alike(self.keys, keys) and alike(self.values, values)

    def in_rooms(self) -> bool:
        """Whether nobody has put other tensors in here."""
        return self.rooms is not None and self.keys is self.rooms[0].shown and self.values is self.rooms[1].shown

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.in_rooms():
            self.rooms = Room(), Room()
        self.keys = self.rooms[0].append(self.keys, keys)
        self.values = self.rooms[1].append(self.values, values)
        return self.keys, self.values

    def show(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self.rooms[0].show(keys), self.rooms[1].show(values)

    def drop_unused_rooms(self) -> None:
        if not self.in_rooms():
            self.rooms = None

    def crop(self, tokens_to_remove: int) -> None:
        in_rooms = self.in_rooms()
        super().crop(tokens_to_remove)
        if in_rooms:
            self.show(self.keys, self.values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.in_rooms():
            self.keys, self.values = (room.reorder(beam_idx) for room in self.rooms)
        else:
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.drop_unused_rooms()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.drop_unused_rooms()

    def offload(self) -> None:
        super().offload()
        self.drop_unused_rooms()

    def reset(self) -> None:
        super().reset()
        self.drop_unused_rooms()

    def __reduce_ex__(self, protocol):
        copied = self.original.__new__(self.original)
        copied.__dict__ |= {name: value for name, value in vars(self).items() if name != "rooms"}
        if self.in_rooms():  # without what is in the rooms beside them
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
        return copied.__reduce_ex__(1)  # from protocol 2 on, pickle insists on the class of what it was given


class GrowingLayer(Growing):
    original = DynamicLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.may_grow(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        return self.append(key_states, value_states)


class GrowingSlidingWindowLayer(Growing, DynamicSlidingWindowLayer):
    """The window moves through its memory, and to new memory when it has come to the end."""

    original = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.may_grow(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        more, before = key_states.shape[-2], self.sliding_window - 1
        if not self.record_past and self.exceeds_the_window(more):
            states = super().update(key_states, value_states, *args, **kwargs)
            self.rooms = None
            self.append(key_states[..., :0, :], value_states[..., :0, :])
            return states
        self.cumulative_length += more
        keys, values = self.append(key_states, value_states)
        if self.record_past:
            return keys[:, :, -before - more :, :], values[:, :, -before - more :, :]
        self.show(keys[:, :, -before:, :], values[:, :, -before:, :])
        return keys, values

    def exceeds_the_window(self, more: int) -> bool:
        """Whether with so many new rows the memory would be too large for those that stay."""
        total = more + (rows_of(self.keys) if self.is_initialized else 0)
        return rows_to_allocate(total) > most_rows(min(total, self.sliding_window - 1))


GROWING = {cls.original: cls for cls in (GrowingLayer, GrowingSlidingWindowLayer)}


def grow_in_place(cache: Cache | None, attention: nn.Module) -> None:
    """Called by each fused layer with the cache that its attention is about to update.

    Only transformers' own `DynamicCache` and its two plain kinds of layers change, and they change their class alone.
    """
    if type(cache) is not DynamicCache or cache.offloading or torch.compiler.is_compiling():
        return
    index = getattr(attention, "layer_idx", len(cache.layers))
    if index < len(cache.layers) and type(cache.layers[index]) in GROWING:
        for layer in cache.layers:
            layer.__class__ = GROWING.get(type(layer), type(layer))
