"""The KV cache of a patched model grows in place: the keys and values of a token are appended to the stored ones.

transformers' `DynamicCache` concatenates, which copies all stored keys and values for every token. Here they are rows
of larger memory with space for more, and `layer.keys` and `layer.values` are views of the stored rows.

A tensor that was taken out of the cache does not change, with one exception: after `crop`, new tokens overwrite the
cropped rows. A copy of a cache (deepcopy, pickle) shares no memory with it, and has transformers' own layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import cached_backends
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ... import extension  # noqa: F401  loads the library with the class
from ...grad import in_forward_mode

#: The stored rows of a layer, in C++ (csrc/room.h), since ops and tapes use them as well.
Room = torch.ScriptObject
new_room = torch.classes.moe_metal.Room


def rows_to_allocate(stored: int) -> int:
    """As in csrc/room.h."""
    return stored + stored // 4 + 192


def most_rows(stored: int) -> int:
    """As in csrc/room.h: memory with more rows is replaced."""
    return stored + stored // 4 + 256


def rows_of(stored: Tensor | None) -> int:
    return 0 if stored is None or stored.dim() == 1 else stored.shape[-2]  # a layer begins with torch.tensor([])


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


class ForTape(NamedTuple):
    """What a tape gets of a layer of the cache besides its room."""

    #: Of a mixer: its state, the convolution's rows and the log, and the positions in both.
    inputs: tuple = (None, None, None, 0, 0)
    pending: int = 0  # rows of the log that the state does not contain yet


PARTS = ("keys", "values")
OURS = ("room", "side_by_side", "tape")  # the attributes that transformers' layers do not have


def stored_part(name: str) -> property:
    """The attribute `keys` or `values`: views of the room's rows, if there is a room. An assignment ends its use."""
    index = PARTS.index(name)

    def read(self) -> Tensor | None:
        return self.room.shown()[index] if self.in_room() else self.__dict__.get(name)

    def write(self, value: Tensor | None) -> None:
        self.leave_room()
        self.__dict__[name] = value

    return property(read, write)


class Growing(DynamicLayer):
    """The base class of our two kinds of layers. Everything else is transformers'."""

    original: type  # the class that this layer had before
    room: Room | None = None
    tape = None  # the LayerTape of the layer of the model that appends to this one
    side_by_side = False  # a row of the memory is a key and its value
    keys, values = stored_part("keys"), stored_part("values")

    def window(self) -> int:
        """How many of the stored rows later tokens see; -1: all."""
        return -1

    def in_room(self) -> bool:
        """Whether to ask the room. torch.compile cannot: it reads what `show` has stored. A trace gets tensors."""
        if self.room is None:
            return False
        if torch.compiler.is_compiling():
            if "keys" not in self.__dict__:
                raise RuntimeError(
                    "torch_moe_metal: expected torch.compile to be called before this cache was filled, got a cache "
                    "that other calls have filled; compute one more token without torch.compile first"
                )
            return False
        if torch.jit.is_tracing():
            self.leave_room()
        return self.room is not None

    def show(self) -> None:
        """Store what torch.compile reads, if it is used at all. Called after each change of the room."""
        if any(cached_backends.values()):  # torch.compiler.disable has None
            self.take_from(self.room)

    def for_tape(self, mask: Tensor | None) -> ForTape | None:
        return None if self.room is None else ForTape()

    def replayed(self) -> None:
        """Called after a tape has appended a token."""
        self.show()

    def may_grow(self, keys: Tensor, values: Tensor) -> bool:
        """Not if a trace would record the writes, or if autograd may need the tensors that they change."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or in_forward_mode():
            return False
        return alike(self.keys, keys) and alike(self.values, values)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store these rows. Returns those that their queries see."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if self.room is None:
            self.enter_room(keys, values)
        seen = self.room.append(keys, values)
        self.show()
        return seen

    def enter_room(self, keys: Tensor, values: Tensor) -> None:
        own, new = vars(self), {"keys": keys, "values": values}
        stored = [own[name] if rows_of(own[name]) else new[name][..., :0, :] for name in PARTS]
        room = new_room(*stored, self.side_by_side and keys.shape[:-1] == values.shape[:-1], self.window())
        own["room"] = room
        del own["keys"], own["values"]
        self.show()

    def leave_room(self) -> None:
        """From now on keys and values are tensors like those of transformers."""
        room, self.room = self.room, None
        if room is not None and not torch.compiler.is_compiling():
            trace = torch._C._get_tracing_state()
            torch._C._set_tracing_state(None)  # it cannot record calls of the room
            try:
                self.take_from(room)
            finally:
                torch._C._set_tracing_state(trace)

    def take_from(self, room: Room) -> None:
        self.__dict__["keys"], self.__dict__["values"] = room.shown()

    def get_seq_length(self) -> int:
        return self.room.rows() if self.in_room() else super().get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        room = self.room
        super().crop(tokens_to_remove)
        if room is not None and self.room is None:
            own = self.__dict__
            room.show(own.pop("keys"))
            room.set_total(own.get("cumulative_length", 0))
            del own["values"]
            self.room = room
            self.show()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.room is not None and self.get_seq_length() > 0:  # transformers leaves a layer without tokens unchanged
            self.room.reorder(beam_idx)
        else:
            super().reorder_cache(beam_idx)

    def __reduce_ex__(self, protocol):
        copied = self.original.__new__(self.original)
        copied.__dict__ |= {name: value for name, value in vars(self).items() if name not in OURS}
        if self.room is not None:  # only the stored rows
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

    @property
    def cumulative_length(self) -> int:
        return self.room.total() if self.in_room() else self.__dict__["cumulative_length"]

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        self.__dict__["cumulative_length"] = tokens
        if self.in_room():
            self.room.set_total(tokens)

    def window(self) -> int:
        return self.sliding_window - 1

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.may_grow(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if self.record_past or not self.exceeds_the_window(key_states.shape[-2]):
            return self.append(key_states, value_states)
        states = super().update(key_states, value_states, *args, **kwargs)
        self.append(key_states[..., :0, :], value_states[..., :0, :])  # to memory of their own
        return states

    def exceeds_the_window(self, more: int) -> bool:
        """Whether memory for this many new rows would be too large for the rows that stay in the window."""
        total = more + rows_of(self.keys)
        return rows_to_allocate(total) > most_rows(min(total, self.sliding_window - 1))

    @property
    def record_past(self) -> bool:
        return self.__dict__["record_past"]

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self.__dict__["record_past"] = records
        if self.in_room():
            self.room.keep_past(records)

    def enter_room(self, keys: Tensor, values: Tensor) -> None:
        tokens = self.__dict__["cumulative_length"]
        super().enter_room(keys, values)
        self.cumulative_length = tokens
        self.room.keep_past(self.record_past)

    def take_from(self, room: Room) -> None:
        super().take_from(room)
        self.__dict__["cumulative_length"] = room.total()

    def __reduce_ex__(self, protocol):
        vars(self)["cumulative_length"] = self.cumulative_length
        return super().__reduce_ex__(protocol)


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


def room_of(cache: Cache | None, attention: nn.Module) -> Room | None:
    """The room to which the next token of this attention is appended, if its layer of the cache has one."""
    layers, index = getattr(cache, "layers", ()), getattr(attention, "layer_idx", -1)
    layer = layers[index] if 0 <= index < len(layers) else None
    if not isinstance(layer, Growing) or torch.is_grad_enabled() or in_forward_mode():
        return None
    return None if torch.compiler.is_compiling() or torch.jit.is_tracing() else layer.room


def joined_rows(keys: Tensor, values: Tensor) -> Tensor | None:
    """Keys and values as one tensor, if each key is directly before its value in memory; else None."""
    memory, strides = keys.untyped_storage().data_ptr(), keys.stride()
    width = keys.shape[-1] + values.shape[-1]
    if values.untyped_storage().data_ptr() != memory or values.stride() != strides or strides[-2] < width:
        return None
    if values.storage_offset() != keys.storage_offset() + keys.shape[-1]:
        return None
    return keys.as_strided((*keys.shape[:-1], width), strides)
