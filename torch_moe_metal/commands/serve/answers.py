"""Answers: what is added to transformers' own, and errors in OpenAI's form."""

import contextlib
import json
import re
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers.cli.serving import chat_completion, completion, response

from .requests import current


def with_logprobs(event: str, logprobs: dict) -> str:
    value = json.loads(event.removeprefix("data: "))
    value["choices"][0]["logprobs"] = logprobs
    return as_event(value)


#: An event with a count of tokens.
COUNTED = re.compile(r'^data: (\{.*"usage": ?\{.*\})$', re.MULTILINE)


def with_reused(answer: dict) -> dict:
    """An answer, or the last event of a stream, with the number of the prompt's tokens that were not computed again."""
    usage = answer.get("usage") or answer.get("response", {}).get("usage") or {}
    name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    if usage:
        request = current.get()
        usage[name] = (usage.get(name) or {}) | {"cached_tokens": (request.parts or [request])[0].reused}
    return answer


async def with_reused_in(parts: AsyncIterator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(parts):
        async for part in parts:
            yield COUNTED.sub(lambda event: f"data: {json.dumps(with_reused(json.loads(event[1])))}", part)


#: The beginning of an error in transformers' streams. The message after it is not escaped.
ERROR = 'data: {"error": "'


def as_openai_stream(response):
    """End a stream with OpenAI's last line, for which some clients wait, and write an error in it as an object."""

    async def events(parts: AsyncIterator[str]) -> AsyncIterator[str]:
        async with contextlib.aclosing(parts):
            async for part in parts:
                before, mark, message = part.partition(ERROR)
                yield before + as_event(error_body(message.removesuffix('"}\n\n'), 500)) if mark else part
        yield "data: [DONE]\n\n"

    if isinstance(response, StreamingResponse):
        response.body_iterator = events(response.body_iterator)
    return response


def build_schemas() -> None:
    """Pydantic builds the schemas of answers when they are first used, which takes half a second of the event loop."""
    for module in (chat_completion, completion, response):
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, BaseModel):
                each.model_rebuild()


def as_event(value: dict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def error_body(message: str, status: int, code: str | None = None, param: str | None = None) -> dict:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: value and without_surrogates(value) for name, value in fields.items()}}


def without_surrogates(text: str) -> str:
    """JSON may have halves of surrogate pairs, and UTF-8 may not."""
    return text.encode(errors="replace").decode()
