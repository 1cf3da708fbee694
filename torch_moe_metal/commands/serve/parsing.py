"""Answers in which the model has not written a tool call as its template says, or not to the end: the call is text.

transformers' parser raises an error for them.
"""

from transformers.cli.serving.utils import _normalize_tool_call

from .stopping import cut


def check_call(call: dict) -> None:
    if not isinstance(_normalize_tool_call(call).name, str):
        raise TypeError("a tool call without a name")


class LenientTokenizer:
    """A tokenizer, or that of a processor, which parses a whole answer. The content ends before a stop string."""

    def __init__(self, processor, stops: list[str]):
        self.tokenizer, self.inner, self.stops = self, getattr(processor, "tokenizer", processor), stops

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def parse_response(self, ids, template: dict, **options) -> dict:
        try:
            message = self.inner.parse_response(ids, template, **options)
            for call in message.get("tool_calls") or ():
                check_call(call)
        except Exception:
            message = {"content": self.inner.decode(ids, skip_special_tokens=True)}
        return message | {"content": cut(message.get("content") or "", self.stops)}


class LenientParser:
    """A parser of an answer in pieces."""

    def __init__(self, parser):
        self.parser, self.initial_events = parser, parser.initial_events
        self.held, self.failed = "", False  # the text of the call that is being written

    def feed(self, text: str) -> list[dict]:
        if self.failed:
            return as_content(text)
        try:
            events = self.parser.feed(text)
            for event in events:
                if event["type"] == "region_close" and event.get("field") == "tool_calls":
                    check_call(event.get("value"))
        except Exception:
            self.failed = True
            return as_content(self.held + text)
        for event in events:
            if event["type"] == "region_close":
                self.held = ""
            elif event.get("dirty"):
                self.held += event.get("text") or ""
        return events

    def finalize(self) -> tuple[dict, list[dict]]:
        if not self.failed:
            try:
                return self.parser.finalize()
            except Exception:
                return {}, as_content(self.held)
        return {}, []


def as_content(text: str) -> list[dict]:
    return [{"type": "region_chunk", "field": "content", "text": text}]
