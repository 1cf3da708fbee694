"""Stop strings: an answer ends before the first one, also where its text comes in pieces."""

from transformers.cli.serving.utils import ToolCall


class StopFilter:
    """Passes pieces of text on until a stop string begins. Text that may be the beginning of one is held back. With
    `one_call` the answer ends after the first tool call, too."""

    def __init__(self, stops: list[str], one_call: bool = False):
        self.stops, self.one_call, self.held, self.found = stops, one_call, "", False
        self.stop: str | None = None  # the one that was found

    def feed(self, item: object) -> list[object]:
        """The items that may be sent now. After a stop string this ends with None, which ends the answer."""
        if type(item) is not str:  # a tool call, the end, or reasoning, which is a subclass of str
            held, self.held = self.held, ""
            self.found = self.one_call and isinstance(item, ToolCall)
            return [held] * bool(held) + [item] + [None] * self.found
        if not self.stops:
            return [item]
        text = self.held + item
        if (end := first_stop(self.stops, text)) is not None:
            self.held, self.found = "", True
            self.stop = next(stop for stop in self.stops if text.startswith(stop, end))
            return [text[:end], None] if end else [None]
        split = len(text) - max(overlap(stop, text) for stop in self.stops)
        self.held = text[split:]
        return [text[:split]] if split else []


def first_stop(stops: list[str], text: str) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def overlap(stop: str, text: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def cut(text: str, stops: list[str]) -> str:
    return text[: first_stop(stops, text)]
