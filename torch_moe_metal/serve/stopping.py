"""Stop strings: an answer ends before the first one, also where its text comes in pieces."""


class StopFilter:
    """Passes pieces of text on until a stop string begins. Text that may be the beginning of one is held back."""

    def __init__(self, stops: list[str]):
        self.stops, self.held, self.found = stops, "", False

    def feed(self, item: object) -> list[object]:
        """The items that may be sent now. After a stop string this ends with None, which ends the answer."""
        if not self.stops:
            return [item]
        if type(item) is not str:  # a tool call, the end, or reasoning, which is a subclass of str
            held, self.held = self.held, ""
            return [held, item] if held else [item]
        text = self.held + item
        if (end := first_stop(self.stops, text)) is not None:
            self.held, self.found = "", True
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
