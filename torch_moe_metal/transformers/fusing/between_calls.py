"""Changes of a model between the calls of its forward by other threads.

A call during which classes and configurations change would mix two versions: a fused forward of a module that is no
longer fused, or a mask for another implementation of attention. So running calls end first, and new ones wait. Calls
cost nothing more for it: running ones are found on the stacks of the threads.
"""

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, RLock, get_ident
from types import FrameType

from torch import nn

CALL = nn.Module.__call__.__code__
GATE = "_compiled_call_impl"  # nn.Module calls this attribute, if it is set, instead of its forward
SECONDS = 60  # for running calls to end
changing = RLock()


@contextmanager
def between_calls(model: nn.Module, caller: str) -> Iterator[None]:
    """Raises if a call of another thread does not end: it may wait for this thread."""
    modules = {id(module): module for module in model.modules()}
    own, waiting, changed = get_ident(), set(), Event()

    def gate(call, *args, **kwargs):
        thread = get_ident()
        if thread != own and calls_on(sys._getframe(), modules) == 1:  # not within a running call
            waiting.add(thread)
            changed.wait()
        return call(*args, **kwargs)

    with changing:
        before = {key: vars(module).get(GATE) for key, module in modules.items()}
        try:
            for key, module in modules.items():
                vars(module)[GATE] = functools.partial(gate, before[key] or module._call_impl)
            wait_for_others(modules, own, waiting, caller)
            yield
        finally:
            for key, module in modules.items():
                if before[key] is None:
                    del vars(module)[GATE]
                else:
                    vars(module)[GATE] = before[key]
            changed.set()


def calls_on(stack: FrameType | None, modules: dict[int, nn.Module]) -> int:
    """How many calls of these modules are on the stack of a thread."""
    count = 0
    while stack is not None:
        if stack.f_code is CALL:
            count += id(stack.f_locals["self"]) in modules
        stack = stack.f_back
    return count


def wait_for_others(modules: dict[int, nn.Module], own: int, waiting: set[int], caller: str) -> None:
    end = time.monotonic() + SECONDS
    while any(
        thread != own and calls_on(stack, modules) and thread not in waiting
        for thread, stack in sys._current_frames().items()
    ):
        if time.monotonic() > end:
            raise RuntimeError(
                f"torch_moe_metal.{caller}: expected no call of the model by another thread for longer than {SECONDS} "
                "seconds, got one; nothing is changed"
            )
        time.sleep(0.001)
