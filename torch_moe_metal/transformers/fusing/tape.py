"""A fused layer in one call: for a token after the second one of a cache, a tape replays what the layer has called
before (csrc/tape.h), without its Python code.

Whether the code would do the same again is checked for every token: modules, parameters, their memory, hooks, settings
and modes (`Guard`). If not, the code runs, and the next token records it again. A tape belongs to a layer of the model
and a layer of the cache, and keeps neither of them alive.
"""

import os
import weakref
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from ..versions import CACHE
from .cache import Cache, Growing, Room
from .linear_cache import GrowingLinearLayer
from .members import prepared_results
from .projections import FEW_TOKENS

#: TORCH_MOE_METAL_TAPE=0 switches tapes off.
ENABLED = os.environ.get("TORCH_MOE_METAL_TAPE", "1") != "0"
#: A layer whose state changes more often than this in a conversation is not recorded again.
MOST_RECORDINGS = 8

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [getattr(nn_module, f"_global{name}") for name in (*HOOKS[:2], "_backward_hooks", "_backward_pre_hooks")]
#: Arguments of a layer that change with each token without an effect, since angles and mask are inputs of the tape.
OF_POSITION = {CACHE, "position_ids", "cache_position"}
PLAIN_VALUES = (bool, int, float, str, type(None))
Stored = Growing | GrowingLinearLayer


def modes() -> tuple:
    """What decides, besides modules and arguments, which code runs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("mps"),
        torch._C._len_torch_dispatch_stack(),
        forward_ad._current_level,
        torch._C._get_tracing_state() is not None,
        any(GLOBAL_HOOKS),
    )


PLAIN = ((False, True, False, 0, -1, False, False), (False, False, False, 0, -1, False, False))


def plain_values(own: dict) -> itemgetter:
    return itemgetter(*(name for name, value in own.items() if isinstance(value, PLAIN_VALUES)))


class Guard:
    """Whether a layer would still run the same code on the same tensors. It keeps the layer's parts, but not the layer.

    It is read for each token and layer, so it leaves the loops to C: 4 us for Qwen3. The tape itself checks the memory
    of the tensors."""

    def __init__(self, layer: nn.Module):
        modules = list(layer.modules())
        self.inner, owns = modules[1:], [vars(module) for module in modules]
        tables = [own[name] for own in owns for name in ("_parameters", "_buffers", "_modules")]
        # Hooks of the layer itself run outside of the tape.
        self.empty = [table for table in tables if not table] + [own[name] for own in owns[1:] for name in HOOKS]
        self.members = [table.values() for table in tables if table]
        self.owns = owns
        configs = {id(own["config"]): vars(own["config"]) for own in owns if "config" in own}
        # Numbers and names, such as top_k, `training` and the implementation of attention.
        self.plain = [(plain_values(own), own) for own in (*owns, *configs.values())]
        parameters = [own[name] for own in owns for name in ("_parameters", "_buffers")]
        self.tensors = [tensor for table in parameters for tensor in table.values() if tensor is not None]
        self.prepared = [result for module in modules for result in prepared_results(module)]
        self.kind, self.modes, self.state = type(layer), modes(), self.read()

    def constants(self) -> list[Tensor]:
        return [*self.tensors, *(result for _, _, result in self.prepared)]

    def read(self) -> tuple:
        return (
            [*map(id, chain.from_iterable(self.members))],
            [*map(type, self.inner)],
            [*map(len, self.owns)],
            [values(own) for values, own in self.plain],
        )

    def holds(self, layer: nn.Module) -> bool:
        try:
            if any(self.empty) or type(layer) is not self.kind or modes() != self.modes or self.read() != self.state:
                return False
        except KeyError:  # an attribute was deleted
            return False
        return all([weight._version == version for weight, version, _ in self.prepared])


class LayerTape:
    """The tape of a layer of the model for a layer of a cache, which holds this object."""

    replay: Callable | None = None
    guard: Guard
    room: Room | None
    others: dict  # the arguments of the layer besides the tape's inputs and positions, and what of the cache is as then
    steps = 0  # tokens since there was a tape
    recordings = 0

    def __init__(self, layer: nn.Module):
        itself = weakref.ref(self)  # a cycle would keep the cache's memory until the next garbage collection
        self.layer = weakref.ref(layer, lambda _: (tape := itself()) and tape.clear())
        self.refused = layer in REFUSALS
        TAPES.setdefault(layer, WeakSet()).add(self)

    def clear(self) -> None:
        """Keep no weights."""
        self.__dict__.pop("replay", None)
        self.__dict__.pop("guard", None)

    def replayed(self, layer: nn.Module, room: Room | None, inputs: tuple, others: dict) -> Tensor | None:
        """The layer's output, or None if its code must run."""
        if self.replay is None or self.room is not room or self.others != others or not self.guard.holds(layer):
            return None
        return self.replay(*inputs)

    def may_be_recorded(self) -> bool:
        """At the second of several tokens: many answers have only one."""
        self.steps = 1 if self.replay else self.steps + 1
        self.clear()
        return self.steps >= 2 and self.recordings < MOST_RECORDINGS and modes() in PLAIN

    def recorded(self, layer: nn.Module, stored: Stored, inputs: tuple, others: dict, forward: Callable) -> Tensor:
        """The output of `forward`, which is recorded."""
        guard, room, output = Guard(layer), stored.room, None
        if any(guard.empty):
            return forward()
        recorder = torch.classes.moe_metal.Tape(inputs[:-2], inputs[-2:], guard.constants())
        self.recordings += 1
        recorder.begin()
        try:
            output = forward()
        finally:
            recorder.end(output)
        if refusal := recorder.refusal():
            self.refused = True
            if len(inputs[0]) <= FEW_TOKENS:  # larger batches run on PyTorch's products
                REFUSALS[layer] = refusal
        elif stored.room is room and guard.holds(layer):
            self.guard, self.others, self.room, self.replay = guard, others, room, recorder.replay
        return output


#: The tapes of each layer, and why a layer cannot be recorded.
TAPES: WeakKeyDictionary[nn.Module, WeakSet[LayerTape]] = WeakKeyDictionary()
REFUSALS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def layer_of_cache(layer: nn.Module, x: Tensor, kwargs: dict) -> Stored | None:
    """The layer of the cache, if it is ours and if `x` is one new token of each sequence."""
    if not ENABLED or type(x) is not Tensor or x.dim() != 3 or x.shape[1] != 1 or torch.compiler.is_compiling():
        return None
    layers, index = getattr(kwargs.get(CACHE), "layers", ()), layer.mixer()[1].__dict__.get("layer_idx", -1)
    stored = layers[index] if 0 <= index < len(layers) else None
    return stored if isinstance(stored, Stored) else None


def computed(layer: nn.Module, forward: Callable, x: Tensor, mask, angles, kwargs: dict) -> Tensor:
    """The output of a layer for one new token of each sequence: replayed if there is a tape, else by `forward()`, which
    may be recorded."""
    stored = layer_of_cache(layer, x, kwargs)
    part = None if stored is None else stored.for_tape(mask)
    if part is not None and type(angles) is Tensor and angles.is_complex():
        angles = angles.real, angles.imag
    if part is None or not (angles is None or (type(angles) is tuple and len(angles) == 2)):
        return forward()
    tape = stored.tape
    if tape is None or tape.layer() is not layer:
        tape = stored.tape = LayerTape(layer)
    if tape.refused:
        return forward()
    inputs = (x, *(angles or (None, None)), mask, *part.inputs)
    others = {name: value for name, value in kwargs.items() if name not in OF_POSITION}
    others["rows to apply"] = part.pending
    if not all(isinstance(value, PLAIN_VALUES) for value in others.values()):  # tensors may differ with each token
        return forward()
    output = tape.replayed(layer, stored.room, inputs, others)
    if output is None:
        return tape.recorded(layer, stored, inputs, others, forward) if tape.may_be_recorded() else forward()
    stored.replayed()
    return output


def replayed_layers(cache: Cache) -> int:
    """How many layers of the model are replayed with this cache."""
    tapes = [getattr(layer, "tape", None) for layer in cache.layers]
    return sum(tape is not None and tape.replay is not None for tape in tapes)


def why_not_taped(layer: nn.Module) -> str | None:
    """Why the tokens of this layer are not replayed, or None. An op that a tape cannot replay is known after the first
    few tokens."""
    if not ENABLED:
        return "TORCH_MOE_METAL_TAPE is 0"
    return layer.why_never_taped() or REFUSALS.get(layer)


def forget(layer: nn.Module) -> None:
    """Drop the tapes of this layer, which keep its weights' memory, and what is known about it."""
    for tape in TAPES.pop(layer, ()):
        tape.clear()
        tape.refused = False
    REFUSALS.pop(layer, None)
