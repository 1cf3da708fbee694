"""Answers that are computed at once take turns on the device: a turn is one token, or one piece of a prompt.

Each answer is a `generate` on a thread of its own. PyTorch's MPS backend is not safe under several threads, so a thread
touches the device only in its turn. All threads draw from one generator of random numbers, so a thread restores the
generator at the beginning of its turn.
"""

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable

import torch


class Turns:
    """A lock that threads get in the order of their calls."""

    def __init__(self, device: torch.device):
        self.on_mps = device.type == "mps" and torch.backends.mps.is_built()
        self.taken = False
        self.waiting: deque[threading.Lock] = deque()
        self._mutex = threading.Lock()

    def __enter__(self) -> None:
        with self._mutex:
            if not self.taken:
                self.taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self.waiting.append(mine)
        mine.acquire()  # until `__exit__` hands the turn over

    def __exit__(self, *_error) -> None:
        with self._mutex:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self.taken = False

    def finish(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.on_mps:
            torch.mps.synchronize()

    def give_way(self) -> None:
        """End this thread's turn, and wait for its next one. Without another thread that waits it goes on at once."""
        if not self.waiting:
            return
        generator = torch.mps if self.on_mps else torch
        state = generator.get_rng_state()
        self.__exit__()
        self.__enter__()
        generator.set_rng_state(state)


def with_turns(model: torch.nn.Module, before_forward: Callable[[], None]) -> torch.nn.Module:
    """The same model for one `generate`, which calls this before each forward: of a token or a piece of a prompt."""
    view = copy.copy(model)  # with the same modules and weights
    prepare = view.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_inputs(*args, **kwargs) -> dict:
        before_forward()
        return prepare(*args, **kwargs)

    view.prepare_inputs_for_generation = prepare_inputs
    return view
