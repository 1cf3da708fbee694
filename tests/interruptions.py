"""Raises exceptions at every line that runs while a model is changed."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

import torch_moe_metal

HOME = Path(torch_moe_metal.__file__).parent
#: The files whose lines count: our own that change modules, and the code of PyTorch and transformers that they call.
FILES = {str(path) for path in (HOME / "packed_layers.py", HOME / "nn.py", HOME / "all_or_nothing.py")}
FILES |= {str(path) for path in (HOME / "transformers").rglob("*.py")}
FILES |= {torch.nn.modules.module.__file__, transformers.quantizers.base.__file__}


class Lines:
    """Counts these lines while they run, and raises at one of them when it runs for the nth time."""

    def __init__(self, at: tuple[str, int] | None = None, nth: int = 0, error: type[BaseException] = KeyboardInterrupt):
        self.at, self.nth, self.error, self.seen = at, nth, error, Counter()

    def __enter__(self) -> "Lines":
        self.before = sys.gettrace()
        sys.settrace(self.enter_function)
        return self

    def __exit__(self, *raised) -> None:
        sys.settrace(self.before)

    def enter_function(self, frame, event, arg):
        return self.run_line if frame.f_code.co_filename in FILES else None

    def run_line(self, frame, event, arg):
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.seen[place] += 1
            if place == self.at and self.seen[place] == self.nth:
                raise self.error
        return self.run_line


def interrupted(
    make: Callable[[], torch.nn.Module], act: Callable, every: int = 1
) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Makes models with `make` and interrupts `act(model)` in each at another line, when it runs for the first or last
    time. Yields the model, the line's name, and whether the exception was raised. `every`: only one line of so many."""
    with Lines() as lines:
        act(make())
    places = [(place, nth, times) for place, times in lines.seen.items() for nth in sorted({1, times})]
    for i, (place, nth, times) in enumerate(places[::every]):
        model, error, raised = make(), (KeyboardInterrupt, MemoryError)[i % 2], False
        try:
            with Lines(place, nth, error):
                act(model)
        except error:
            raised = True
        yield f"{error.__name__} at {Path(place[0]).name}:{place[1]}, {nth} of {times}", model, raised
