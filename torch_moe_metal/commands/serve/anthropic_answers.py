"""Answers of /v1/messages, made of those of /v1/chat/completions."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator

from .requests import Request

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(message: str, status: int) -> dict:
    kind = KINDS.get(status, "api_error" if status >= 500 else KINDS[400])
    return {"type": "error", "error": {"type": kind, "message": message}}


def message(answer: dict, request: Request, shows: bool) -> dict:
    choice = answer["choices"][0]
    made, content = choice["message"], []
    if shows and made.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": made["reasoning_content"], "signature": ""})
    if made.get("content"):
        content.append({"type": "text", "text": made["content"]})
    for call in made.get("tool_calls") or ():
        block = {"type": "tool_use", "id": new_id("toolu"), "name": call["function"]["name"]}
        content.append(block | {"input": arguments(call["function"]["arguments"])})
    usage = used(request) | {"output_tokens": answer["usage"]["completion_tokens"]}
    return empty(answer["model"]) | {"content": content, "usage": usage} | ended(choice["finish_reason"], request)


def empty(model: str) -> dict:
    made = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model, "content": []}
    return made | {"stop_reason": None, "stop_sequence": None}


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def arguments(text: str) -> dict:
    """The input of a call, which is always an object here."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    return {"arguments": text}


def used(request: Request) -> dict:
    read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": request.reused}
    return {"input_tokens": request.prompt - request.reused, **read}


def ended(reason: str, request: Request) -> dict:
    named = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
    if named == "end_turn" and request.stop is not None:
        named = "stop_sequence"
    return {"stop_reason": named, "stop_sequence": request.stop if named == "stop_sequence" else None}


class Events:
    """Makes the events of a stream. Blocks follow each other, and each is ended before the next one."""

    def __init__(self, request: Request, shows: bool):
        self.request, self.shows = request, shows
        self.index, self.kind = -1, ""

    def start(self, model: str) -> Iterator[dict]:
        usage = {"input_tokens": self.request.prompt, "output_tokens": 0}
        yield {"type": "message_start", "message": empty(model) | {"usage": usage}}

    def of(self, chunk: dict) -> Iterator[dict]:
        """The events of a chunk of chat."""
        choice = chunk["choices"][0]
        delta = choice["delta"]
        if self.shows and (text := delta.get("reasoning_content")):
            yield from self.opened("thinking", {"thinking": "", "signature": ""})
            yield self.delta("thinking_delta", thinking=text)
        if text := delta.get("content"):
            yield from self.opened("text", {"text": ""})
            yield self.delta("text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            yield from self.closed()
            yield from self.opened("tool_use", {"id": new_id("toolu"), "name": call["function"]["name"], "input": {}})
            given = json.dumps(arguments(call["function"]["arguments"]))
            yield self.delta("input_json_delta", partial_json=given)
        if choice.get("finish_reason"):
            yield from self.closed()
            usage = used(self.request) | {"output_tokens": chunk["usage"]["completion_tokens"]}
            delta = ended(choice["finish_reason"], self.request)
            yield {"type": "message_delta", "delta": delta, "usage": usage}
            yield {"type": "message_stop"}

    def opened(self, kind: str, block: dict) -> Iterator[dict]:
        if self.kind != kind:
            yield from self.closed()
            self.index, self.kind = self.index + 1, kind
            yield {"type": "content_block_start", "index": self.index, "content_block": {"type": kind, **block}}

    def closed(self) -> Iterator[dict]:
        if self.kind:
            if self.kind == "thinking":
                yield self.delta("signature_delta", signature="")
            self.kind = ""
            yield {"type": "content_block_stop", "index": self.index}

    def delta(self, kind: str, **values: str) -> dict:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, **values}}


async def stream(parts: AsyncIterator[str], events: Events, model: str) -> AsyncIterator[str]:
    """The events of a stream of chat."""
    async with contextlib.aclosing(parts):
        for event in events.start(model):
            yield as_event(event)
        async for part in parts:
            for text in part.split("\n\n")[:-1]:
                chunk = text.removeprefix("data: ")
                if chunk == "[DONE]":
                    return
                value = json.loads(chunk)
                if "error" in value:
                    yield as_event(error_body(value["error"]["message"], 500))
                    return
                for event in events.of(value):
                    yield as_event(event)


def as_event(event: dict) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
