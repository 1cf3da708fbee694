"""What a fused mixer with a recurrent state reads and writes in transformers' cache.

transformers' `LinearAttentionLayer` holds the last W inputs of the convolution, [B, C, W], and the recurrent state. For
every token it shifts the former and copies the latter. In a patched model the state is written in place, and the inputs
are rows of larger memory [B, rows, C], so that a token writes one row. `conv_states[0]` is a view of the last W rows.

While the cache records (for drafts, prompt lookup and multi-token prediction), the state is the one before the last
tokens, which a log holds: `crop` then only forgets rows, and the next call applies those that are left. Reading
`recurrent_states` applies them at once. So all other code of transformers sees the layer that it knows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .cache import ForTape

ops = torch.ops.moe_metal

#: A call of up to this many tokens can be cropped as a whole.
MOST_DRAFTED = 128
#: Of a longer call the last tokens: drafts can come with a prompt.
LAST_OF_PROMPT = 64
#: New memory has so many rows without a token.
FREE_ROWS = 60


class Sizes(NamedTuple):
    """Of what a mixer keeps: the W taps of the convolution of C channels, and J, A, D and V of its state, if it has
    one."""

    channels: int
    taps: int
    heads: tuple[int, ...] = ()
    by_channel: bool = False  # whether its decays are
    transposed: bool = False  # Mamba 2's state is [A, V, D] in the cache, with the rule "sum"

    def state(self) -> tuple[int, ...]:
        _, A, D, V = self.heads
        return (A, V, D) if self.transposed else (A, D, V)

    def logged(self) -> int:
        """The length of a row of the log."""
        J, A, D, V = self.heads
        return A * V + J * D + (A * D if self.by_channel else A)

    def without_tokens(self, state: Tensor) -> tuple[tuple, dict]:
        """The arguments of a call without tokens, which only applies a log."""
        J, A, D, V = self.heads
        q, v, decay, beta = (
            state.new_empty(len(state), 0, *size)
            for size in ((J, D), (A, V), (A, D) if self.by_channel else (A,), (A,))
        )
        return (q, q, v, decay, *(() if self.transposed else (beta,))), {"rule": "sum"} if self.transposed else {}


class Step(NamedTuple):
    """The arguments of one call, and what to do after it."""

    past: Tensor | None = None
    kept: Tensor | None = None
    state: Tensor | None = None
    log: Tensor | None = None
    replay: int = 0
    continues: bool = False  # whether there were tokens before this call
    done: Callable[[], None] | None = None


WITHOUT_CACHE = Step()


def logged(tokens: int) -> int:
    """How many of the tokens of a call can be cropped."""
    return tokens if tokens <= MOST_DRAFTED else LAST_OF_PROMPT


class GrowingLinearLayer(LinearAttentionLayer):
    """Everything else is transformers'."""

    original = LinearAttentionLayer
    memory: Tensor | None = None  # [B, rows, C], the inputs of the convolution
    end = 0  # rows that are in use
    first = 0  # the first row that is a token since recording began, or one of the W before
    shown: Tensor | None = None  # conv_states[0], if it is a view of the memory
    stale = False  # whether it has to move to the last rows
    log: Tensor | None = None  # [B, rows, F]
    start, pending = 0, 0  # the rows of the log that the state does not contain yet
    cropped = True  # whether those that are left are final
    sizes: Sizes | None = None
    is_ours = False  # whether the last call was
    room = None  # only layers with keys and values have one
    tape = None  # the LayerTape of the layer of the model that uses this one

    # ------------------------------------------------------------------------------- as transformers sees it

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        states = vars(self)["conv_states"]
        if self.stale:
            taps = self.conv_kernel_size[0]
            self.shown = states[0] = self.memory[:, self.end - taps : self.end].mT
            self.stale = False
        return states

    @conv_states.setter
    def conv_states(self, states: dict[int, Tensor | None]) -> None:
        vars(self)["conv_states"] = states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        self.apply_log()
        return vars(self)["recurrent_states"]

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Tensor | None]) -> None:
        vars(self)["recurrent_states"] = states

    @property
    def is_croppable(self) -> bool:
        return self.is_ours or super().is_croppable

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.first = self.end - (self.conv_kernel_size[0] or 0)

    def crop(self, tokens_to_remove: int) -> None:
        count, has_state = -tokens_to_remove, self.is_recurrent_states_initialized[0]
        if not self.record_past or count < 0 or not (self.in_memory() or (has_state and count)):
            super().crop(tokens_to_remove)
            return
        most = self.pending if has_state else self.end - self.conv_kernel_size[0] - self.first
        if count > most:
            raise RuntimeError(
                f"torch_moe_metal: expected to remove at most {most} tokens from a layer of linear attention, those "
                f"that it has recorded, got {count}"
            )
        self.end, self.stale, self.cropped = self.end - count, True, True
        self.pending -= min(count, self.pending)

    def update_conv_state(self, *args, **kwargs) -> Tensor:
        self.leave()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args, **kwargs) -> Tensor:
        self.leave()
        return super().update_recurrent_state(*args, **kwargs)

    def reset(self) -> None:
        self.pending = 0
        super().reset()
        self.forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_batch(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change_batch(lambda states: states[indices, ...])

    def change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """transformers' own layer has neither of these two methods."""
        for states in (self.conv_states, self.recurrent_states):
            states |= {i: change(state) for i, state in states.items() if state is not None}

    def __reduce_ex__(self, protocol):
        """A copy is transformers' own layer, with only the last W rows."""
        copied = self.original.__new__(self.original)
        copied.__dict__ |= {name: value for name, value in vars(self).items() if name not in OURS}
        inputs = {i: None if each is None else each.clone() for i, each in self.conv_states.items()}
        copied.__dict__ |= {"conv_states": inputs, "recurrent_states": {0: self.latest_state()}}
        return copied.__reduce_ex__(1)  # later protocols require the class of the pickled object

    # ------------------------------------------------------------------------------- what our calls do

    def in_memory(self) -> bool:
        """Whether conv_states[0] is still a view of the memory: another tensor can be assigned at any time."""
        return self.memory is not None and vars(self)["conv_states"][0] is self.shown

    def leave(self) -> None:
        """Before transformers' own code writes the states."""
        self.apply_log()
        if self.in_memory():
            states = self.conv_states
            states[0] = states[0].clone()
        self.forget()

    def forget(self) -> None:
        """Everything that is not in transformers' own attributes."""
        self.memory = self.shown = self.log = None
        self.pending, self.stale, self.is_ours = 0, False, False

    def apply_log(self) -> None:
        """Compute the state after all tokens that are left."""
        if self.pending:
            states = vars(self)["recurrent_states"]
            states[0] = writable(states[0])
            self.replay(states[0], self.pending)
            self.start, self.pending = self.start + self.pending, 0

    def replay(self, state: Tensor, rows: int) -> None:
        """Apply so many rows of the log to the state."""
        tensors, options = self.sizes.without_tokens(state)
        log = writable(self.log[:, self.start : self.start + rows])
        state = state.mT if self.sizes.transposed else state
        ops.linear_attention_(*tensors, state=state, log=log, replay=rows, **options)

    def latest_state(self) -> Tensor | None:
        """A copy of the state after all tokens. The layer does not change."""
        state = vars(self)["recurrent_states"][0]
        if state is not None:
            state = state.clone()
            if self.pending:
                self.replay(state, self.pending)
        return state

    def fits(self, x: Tensor, sizes: Sizes) -> bool:
        """Whether this is what a mixer of these sizes left."""
        if not self.has_previous_state[0]:
            return True
        state = vars(self)["recurrent_states"][0]
        if self.in_memory():
            inputs, shape = self.memory, self.memory.shape[::2]
        else:
            inputs = vars(self)["conv_states"][0]
            shape = None if inputs is None else inputs.shape[:2]
        if shape != (len(x), sizes.channels) or not alike(inputs, x, x.dtype):
            return False
        if self.conv_kernel_size[0] != sizes.taps or (state is None) == bool(sizes.heads):
            return False
        return state is None or (state.shape == (len(x), *sizes.state()) and alike(state, x, torch.float32))

    def step(self, x: Tensor, sizes: Sizes) -> Step:
        """What a call for these inputs reads and writes. `done` then makes it the layer's."""
        continues = self.has_previous_state[0]
        place = self.place_inputs(x, sizes)
        own, logged = None, Logged()
        if sizes.heads:
            own = vars(self)["recurrent_states"][0] if continues else None
            own = new_state(x, sizes) if own is None else writable(own)
            logged = self.place_log(own, x.shape[1], sizes)

        def done() -> None:
            if not continues:
                self.initialize(x, sizes)
            if place.memory is not self.memory:
                self.memory, self.first = place.memory, place.first
                vars(self)["conv_states"][0] = self.shown = None
            self.end, self.stale, self.is_ours = place.end, True, True
            if own is not None:
                vars(self)["recurrent_states"][0] = own
                self.start, self.pending, self.cropped, self.sizes = logged.start, logged.pending, False, sizes

        state = own if logged.state is None else logged.state
        state = state.mT if sizes.transposed else state
        return Step(place.past, place.kept, state, logged.log, logged.replay, continues, done)

    def for_tape(self, mask: Tensor | None) -> ForTape | None:
        """None if the next token cannot be replayed. It needs new memory, or nothing has cropped the last tokens while
        the cache records. The others take the same way as `step`."""
        own, memory, log = vars(self), self.memory, self.log
        if mask is not None or memory is None or not self.in_memory() or self.end >= memory.shape[1]:
            return None
        state, records = own["recurrent_states"][0], self.record_past and self.is_recurrent_states_initialized[0]
        steady = self.cropped and log is not None and self.start + 2 <= log.shape[1] if records else log is None
        if not (steady and self.pending == records and self.has_previous_state[0]):
            return None
        if not all(tensor is None or is_writable(tensor) for tensor in (state, memory, log)):
            return None
        return ForTape((state, memory, log, self.end, self.start), self.pending)

    def replayed(self) -> None:
        """Called after a tape has computed a token."""
        self.end, self.stale, self.cropped = self.end + 1, True, False
        self.start += self.pending

    def initialize(self, x: Tensor, sizes: Sizes) -> None:
        """What transformers' layer does at its first call, but for the states."""
        if self.device is None:
            self.dtype, self.device = x.dtype, x.device
        self.conv_kernel_size[0] = sizes.taps
        self.is_conv_states_initialized[0] = self.has_previous_state[0] = True
        self.is_recurrent_states_initialized[0] = bool(sizes.heads)

    def place_inputs(self, x: Tensor, sizes: Sizes) -> "Place":
        """Where the convolution's inputs are and go."""
        (B, T), C, W = x.shape[:2], sizes.channels, sizes.taps
        own, end = (self.memory, self.end) if self.has_previous_state[0] and self.in_memory() else (None, 0)
        if own is not None and end + T <= own.shape[1] and is_writable(own):
            return Place(own, end + T, self.first, own[:, end - W + 1 : end], own[:, end : end + T])
        rows = None  # the last inputs
        if own is not None:
            rows = own[:, (self.first if self.record_past else end - W) : end]
        elif self.has_previous_state[0]:
            rows = last_columns(vars(self)["conv_states"][0].detach(), W).mT
        if T > MOST_DRAFTED or (rows is None and not self.record_past):
            kept = min(W + LAST_OF_PROMPT if self.record_past else W, W - 1 + T)
            memory = x.new_empty(B, kept + FREE_ROWS, C)
            return Place(memory, kept, 0, None if rows is None else rows[:, rows.shape[1] - W + 1 :], memory[:, :kept])
        before = W if rows is None else rows.shape[1]
        memory = x.new_empty(B, before + T + FREE_ROWS, C)
        memory[:, :before] = 0 if rows is None else rows
        past, kept = memory[:, before - W + 1 : before], memory[:, before : before + T]
        return Place(memory, before + T, 0, past, kept)

    def place_log(self, own: Tensor, tokens: int, sizes: Sizes) -> "Logged":
        """Where the rows of the log are and go. Tokens that can still be cropped stay out of the state: then the call
        computes with a copy of it."""
        more = logged(tokens) if self.record_past else 0
        if more and not self.cropped and self.pending + more > MOST_DRAFTED:
            rows = min(self.pending, self.pending + more - MOST_DRAFTED // 2)
            self.replay(own, rows)
            self.start, self.pending = self.start + rows, self.pending - rows
            vars(self)["recurrent_states"][0] = own
        pending, rows = self.pending, self.pending + more
        if not rows:
            self.log = None
            return Logged()
        if self.log is None or self.start + rows > self.log.shape[1] or not is_writable(self.log):
            log = own.new_empty(len(own), rows + FREE_ROWS, sizes.logged())
            if pending:
                log[:, :pending] = self.log[:, self.start : self.start + pending]
            self.log, self.start = log, 0
        log = self.log[:, self.start : self.start + rows]
        if pending and more and not self.cropped:
            return Logged(log, pending, self.start, rows, own.clone())
        return Logged(log, pending, self.start + pending, more)


class Place(NamedTuple):
    """Of the inputs of the convolution."""

    memory: Tensor
    end: int
    first: int
    past: Tensor | None
    kept: Tensor


class Logged(NamedTuple):
    log: Tensor | None = None
    replay: int = 0
    start: int = 0
    pending: int = 0
    state: Tensor | None = None  # a copy, if the state itself must not change


#: The attributes that transformers' layer does not have.
OURS = (
    *("memory", "end", "first", "shown", "stale", "log", "start", "pending", "cropped", "sizes", "is_ours"),
    "tape",
)


def is_writable(tensor: Tensor) -> bool:
    """Memory of inference mode can only be written in inference mode, and autograd may need what has a gradient."""
    return not tensor.requires_grad and (torch.is_inference_mode_enabled() or not tensor.is_inference())


def writable(tensor: Tensor) -> Tensor:
    return tensor if is_writable(tensor) else tensor.detach().clone()


def new_state(x: Tensor, sizes: Sizes) -> Tensor:
    """On mps the keys of each value are neighbours: an H200 then takes 12.8 us for a token of Qwen3.5 instead of 18.9.
    On a CPU it would take 1.2 times as long."""
    shape = (len(x), *sizes.state())
    if x.device.type != "mps" or sizes.transposed:
        return x.new_zeros(shape, dtype=torch.float32)
    return x.new_zeros((*shape[:2], shape[3], shape[2]), dtype=torch.float32).mT


def alike(tensor: Tensor, x: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.device == x.device


def last_columns(states: Tensor, taps: int) -> Tensor:
    """The last W inputs [B, C, W]. While transformers' own code records, it stores all or fewer."""
    columns = states.shape[-1]
    return states[..., columns - taps :] if columns >= taps else F.pad(states, (taps - columns, 0))
