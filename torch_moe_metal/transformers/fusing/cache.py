"""The KV cache of a patched model grows in place: the keys and values of a token are appended to the stored ones.

transformers' `DynamicCache` concatenates, which copies all stored keys and values for every token. Here they are rows
of larger memory with space for more, and `layer.keys` and `layer.values` are views of the stored rows.

A tensor that was taken out of the cache does not change, with one exception: after `crop`, new tokens overwrite the
cropped rows. A copy of a cache (deepcopy, pickle) shares no memory with it, and has transformers' own layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...grad import in_forward_mode


def rows_to_allocate(stored: int) -> int:
    """Fewer than `most_rows`, so that some rows can be cropped before the memory counts as too large and is
    replaced."""
    return stored + stored // 4 + 192


def most_rows(stored: int) -> int:
    return stored + stored // 4 + 256


class Room:
    """Memory [..., rows, width] for the keys of a layer, for its values, or for both: then a row is a key and its
    value."""

    def __init__(self):
        self.memory: Tensor | None = None
        self.shown: list[Tensor] = []  # the layer's tensors: views of the last rows before `end`
        self.end = 0

    def append(self, stored: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
        """The stored rows followed by the new ones. If the new ones fit, only they are copied."""
        old, more = rows_of(stored[0]), new[0].shape[-2]
        if self.memory is None or not self.fits(more, old + more):
            self.move(stored, new, old + more)
        widths = [part.shape[-1] for part in new]
        for rows, part in zip(self.rows(self.end, more, widths), new, strict=True):
            rows.copy_(part)
        self.shown = self.rows(self.end - old, old + more, widths)
        self.end += more
        return self.shown

    def fits(self, more: int, total: int) -> bool:
        """Whether more rows can be written in place. Memory of inference mode can only be written in inference mode."""
        writable = torch.is_inference_mode_enabled() or not self.memory.is_inference()
        return writable and self.end + more <= self.memory.shape[-2] <= most_rows(total)

    def rows(self, first: int, count: int, widths: Sequence[int]) -> list[Tensor]:
        rows = self.memory.narrow(-2, first, count)
        return [rows] if len(widths) == 1 else list(rows.split(widths, -1))

    def move(self, stored: Sequence[Tensor], new: Sequence[Tensor], total: int) -> None:
        """Copy the stored rows to new memory. Never within the old memory, because other tensors may view its rows."""
        widths = [part.shape[-1] for part in new]
        self.memory = new[0].new_empty(*new[0].shape[:-2], rows_to_allocate(total), sum(widths))
        self.end = rows_of(stored[0])
        if self.end:
            for rows, part in zip(self.rows(0, self.end, widths), stored, strict=True):
                rows.copy_(part)

    def show(self, shown: list[Tensor]) -> None:
        """Make these rows of the memory the layer's. Later rows will be overwritten."""
        first = shown[0]
        start = (first.storage_offset() - self.memory.storage_offset()) // self.memory.stride(-2)
        self.shown, self.end = shown, start + first.shape[-2]

    def reorder(self, batch: Tensor) -> list[Tensor]:
        """Reorder the batch. Copies the whole memory, so that the next token does not copy it again."""
        self.memory = self.memory.index_select(0, batch.to(self.memory.device))
        rows, widths = rows_of(self.shown[0]), [part.shape[-1] for part in self.shown]
        self.shown = self.rows(self.end - rows, rows, widths)
        return self.shown


def rows_of(stored: Tensor) -> int:
    return stored.shape[-2] if stored.dim() > 1 else 0  # a layer begins with torch.tensor([])


def alike(stored: Tensor | None, new: Tensor) -> bool:
    """Whether `torch.cat` would only append rows, without broadcasting or type promotion."""
    if type(new) is not Tensor or new.dim() < 2:
        return False
    if stored is None:
        return True
    same_kind = type(stored) is Tensor and stored.dtype == new.dtype and stored.device == new.device
    if stored.dim() == 1:
        return same_kind and not stored.numel()
    old, more = stored.shape, new.shape
    return same_kind and old[-1] == more[-1] and old[:-2] == more[:-2]


OURS = ("rooms", "side_by_side")  # the attributes that transformers' layers do not have


class Growing(DynamicLayer):
    """The base class of our two kinds of layers. Everything else is transformers'."""

    original: type  # the class that this layer had before
    rooms: tuple[Room, ...] = ()  # one for keys and one for values, or one for both
    side_by_side = False  # a row of the memory is a key and its value

    def may_grow(self, keys: Tensor, values: Tensor) -> bool:
        """Not if a trace would record the writes, or if autograd may need the tensors that they change."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_forward_mode():
            return False
        return alike(self.keys, keys) and alike(self.values, values)

    def in_rooms(self) -> bool:
        """Whether keys and values are still views of the rooms: other tensors can be assigned at any time."""
        shown = [part for room in self.rooms for part in room.shown]
        return len(shown) == 2 and self.keys is shown[0] and self.values is shown[1]

    def by_room(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Room, list[Tensor]]]:
        return zip(self.rooms, [[keys, values]] if len(self.rooms) == 1 else [[keys], [values]], strict=True)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.in_rooms():
            one = self.side_by_side and keys.shape[:-1] == values.shape[:-1]
            self.rooms = (Room(),) if one else (Room(), Room())
        if len(self.rooms) == 1:
            self.keys, self.values = self.rooms[0].append((self.keys, self.values), (keys, values))
        else:
            of_keys, of_values = self.rooms
            [self.keys] = of_keys.append((self.keys,), (keys,))
            [self.values] = of_values.append((self.values,), (values,))
        return self.keys, self.values

    def show(self, keys: Tensor, values: Tensor) -> None:
        for room, shown in self.by_room(keys, values):
            room.show(shown)
        self.keys, self.values = keys, values

    def drop_unused_rooms(self) -> None:
        if not self.in_rooms():
            self.rooms = ()

    def crop(self, tokens_to_remove: int) -> None:
        in_rooms = self.in_rooms()
        super().crop(tokens_to_remove)
        if in_rooms:
            self.show(self.keys, self.values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.in_rooms() and self.get_seq_length() > 0:  # transformers leaves a layer without tokens unchanged
            self.keys, self.values = (part for room in self.rooms for part in room.reorder(beam_idx))
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
        copied.__dict__ |= {name: value for name, value in vars(self).items() if name not in OURS}
        if self.in_rooms():  # only the stored rows
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
        return copied.__reduce_ex__(1)  # later protocols require the class of the pickled object


class GrowingLayer(Growing):
    original = DynamicLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.may_grow(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        return self.append(key_states, value_states)


class GrowingSlidingWindowLayer(Growing, DynamicSlidingWindowLayer):
    """The window moves through its memory, and to new memory at the end."""

    original = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.may_grow(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        more, before = key_states.shape[-2], self.sliding_window - 1
        if not self.record_past and self.exceeds_the_window(more):
            states = super().update(key_states, value_states, *args, **kwargs)
            self.rooms = ()
            self.append(key_states[..., :0, :], value_states[..., :0, :])
            return states
        self.cumulative_length += more
        keys, values = self.append(key_states, value_states)
        if self.record_past:
            return keys[:, :, -before - more :, :], values[:, :, -before - more :, :]
        self.show(keys[:, :, -before:, :], values[:, :, -before:, :])
        return keys, values

    def exceeds_the_window(self, more: int) -> bool:
        """Whether memory for this many new rows would be too large for the rows that stay in the window."""
        total = more + (rows_of(self.keys) if self.is_initialized else 0)
        return rows_to_allocate(total) > most_rows(min(total, self.sliding_window - 1))


GROWING = {cls.original: cls for cls in (GrowingLayer, GrowingSlidingWindowLayer)}


def grow_in_place(cache: Cache | None, attention: nn.Module) -> None:
    """Called by each fused layer with the cache that its attention is about to update.

    Only the two plain kinds of layers of transformers' own `DynamicCache` change, and only their class: the caller has
    the cache, so its layers must stay the same objects. The latents of MLA are stored next to the keys that rotate, so
    that both together are the keys of the absorbed form.
    """
    if type(cache) is not DynamicCache or cache.offloading or torch.compiler.is_compiling():
        return
    index = getattr(attention, "layer_idx", len(cache.layers))
    if index < len(cache.layers) and type(cache.layers[index]) in GROWING:
        latents = hasattr(attention, "kv_b_proj")
        for layer in cache.layers:
            if type(layer) in GROWING:
                layer.__class__ = GROWING[type(layer)]
                layer.side_by_side = latents


def joined_rows(keys: Tensor, values: Tensor) -> Tensor | None:
    """Keys and values as one tensor, if each key is directly before its value in memory; else None."""
    memory, strides = keys.untyped_storage().data_ptr(), keys.stride()
    width = keys.shape[-1] + values.shape[-1]
    if values.untyped_storage().data_ptr() != memory or values.stride() != strides or strides[-2] < width:
        return None
    if values.storage_offset() != keys.storage_offset() + keys.shape[-1]:
        return None
    return keys.as_strided((*keys.shape[:-1], width), strides)
