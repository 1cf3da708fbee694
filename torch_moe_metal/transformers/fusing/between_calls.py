"""Changes of a model between the calls of its forward by other threads.

A call during which classes and configurations change would mix two versions: a fused forward of a module that is no
longer fused, or a mask for another implementation of attention. So running calls end first, and new ones wait. Calls
cost nothing more for it: running ones are found on the stacks of the threads.
"""

import functools
import sys
import time
from collections.abc import Callable
from threading import RLock, get_ident
from types import FrameType

from torch import nn

CALL = nn.Module.__call__.__code__
GATE = "_compiled_call_impl"  # nn.Module calls this attribute, if it is set, instead of its forward
SECONDS = 60  # for running calls to end
changing = RLock()
waiting: set[int] = set()  # the threads that wait at a gate, also while a later change begins


class between_calls:
    """`with changing, all_or_nothing(model), between_calls(model, caller):` Raises if a call of another thread does not
    end: it may wait for this thread. After an exception, `all_or_nothing` opens the gates."""

    def __init__(self, model: nn.Module, caller: str):
        self.modules, self.caller = {id(module): module for module in model.modules()}, caller
        self.own = get_ident()
        self.before = {key: vars(module).get(GATE) for key, module in self.modules.items()}

    def __enter__(self) -> None:
        for key, module in self.modules.items():
            vars(module)[GATE] = functools.partial(self.gate, self.before[key] or module._call_impl)
        end = time.monotonic() + SECONDS
        while self.others_are_inside():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"torch_moe_metal.{self.caller}: expected no call of the model by another thread for longer than "
                    f"{SECONDS} seconds, got one; nothing is changed"
                )
            time.sleep(0.001)

    def __exit__(self, *raised) -> None:
        for key, module in self.modules.items():
            vars(module)[GATE] = self.before[key]
            if self.before[key] is None:
                del vars(module)[GATE]

    def gate(self, call: Callable, *args, **kwargs):
        thread = get_ident()
        if thread != self.own and calls_on(sys._getframe(), self.modules) == 1:  # not within a running call
            waiting.add(thread)
            with changing:
                waiting.discard(thread)
        return call(*args, **kwargs)

    def others_are_inside(self) -> bool:
        stacks = {thread: stack for thread, stack in sys._current_frames().items() if thread != self.own}
        return any(calls_on(stack, self.modules) > (thread in waiting) for thread, stack in stacks.items())


def calls_on(stack: FrameType | None, modules: dict[int, nn.Module]) -> int:
    """How many calls of these modules are on the stack of a thread."""
    count = 0
    while stack is not None:
        if stack.f_code is CALL:
            count += id(stack.f_locals["self"]) in modules
        stack = stack.f_back
    return count
