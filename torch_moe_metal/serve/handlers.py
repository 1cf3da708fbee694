"""The server's requests: checked, and answered by transformers' handlers."""

import contextlib
import json
import math
import uuid
from collections.abc import AsyncIterator, Callable

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBWorkerDeadError, Modality

from .generation import Failed, Refused, current, cut

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def whole(value: object) -> bool:
    return type(value) is int


def number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def strings(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


#: What a field must be, where it is given: in words, and as a test.
FIELDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "model": ("a string", lambda value: isinstance(value, str)),
    "messages": ("a list of messages, at least one", lambda value: isinstance(value, list) and len(value) > 0),
    "prompt": ("a string", lambda value: isinstance(value, str)),
    "input": ("a string or a list, not empty", lambda value: isinstance(value, str | list) and len(value) > 0),
    "suffix": ("a string", lambda value: isinstance(value, str)),
    "instructions": ("a string", lambda value: isinstance(value, str)),
    "generation_config": ("a string of JSON", lambda value: isinstance(value, str)),
    "chat_template_kwargs": ("an object", lambda value: isinstance(value, dict)),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "max_tokens": ("a whole number from 1 up", lambda value: whole(value) and value > 0),
    "max_completion_tokens": ("a whole number from 1 up", lambda value: whole(value) and value > 0),
    "max_output_tokens": ("a whole number from 1 up", lambda value: whole(value) and value > 0),
    "temperature": ("a number from 0 to 2", lambda value: number(value) and 0 <= value <= 2),
    "top_p": ("a number above 0, up to 1", lambda value: number(value) and 0 < value <= 1),
    "frequency_penalty": ("a number above -1, up to 2", lambda value: number(value) and -1 < value <= 2),
    "presence_penalty": ("a number from -2 to 2", lambda value: number(value) and -2 <= value <= 2),
    "seed": ("a whole number of 64 bits", lambda value: whole(value) and -(2**63) <= value < 2**63),
    "stop": ("a string, or a list of strings, none of them empty", lambda value: strings(value) and all(listed(value))),
    "tools": ("a list of objects", lambda value: isinstance(value, list) and all(isinstance(x, dict) for x in value)),
    "n": ("1: other numbers of answers are not supported", lambda value: value == 1),
    "best_of": ("1: other numbers of answers are not supported", lambda value: value == 1),
    "echo": ("false: it is not supported", lambda value: value is False),
    "logprobs": ("null or false: they are not supported", lambda value: value is False),
    "response_format": (
        "{'type': 'text'}: other formats are not supported",
        lambda value: isinstance(value, dict) and value.get("type") == "text",
    ),
}
#: What transformers gives to all requests of a batch, or to none.
NOT_BATCHED = ("frequency_penalty", "logit_bias")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")


def listed(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def expect(right: bool, name: str, what: str, got: object) -> None:
    if not right:
        raise Refused(400, f"{name}: expected {what}, got {shortened(got)}", param=name)


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_messages(messages: list, takes_images: bool) -> None:
    for i, message in enumerate(messages):
        expect(isinstance(message, dict), f"messages[{i}]", "an object", message)
        expect(message.get("role") in ROLES, f"messages[{i}].role", f"one of {', '.join(ROLES)}", message.get("role"))
        content = message.get("content")
        expect(content is None or isinstance(content, str | list), f"messages[{i}].content", "a string or parts", content)
        if message["role"] in ("system", "developer", "user"):
            expect(content is not None, f"messages[{i}].content", "a string or parts", content)
        for part in content if isinstance(content, list) else ():
            known = isinstance(part, dict) and isinstance(part.get("type"), str)
            expect(known, f"messages[{i}].content", "parts with a type", part)
            if part["type"] == "text":
                expect(isinstance(part.get("text"), str), f"messages[{i}].content", "a text in a part of text", part)
            elif not takes_images:
                expect(False, f"messages[{i}].content", "parts of text, since the model takes no others", part["type"])


def check_bias(bias: object, vocabulary: int) -> None:
    right = isinstance(bias, dict) and all(
        key.isascii() and key.isdigit() and int(key) < vocabulary and number(value) and -100 <= value <= 100
        for key, value in bias.items()
    )
    expect(right, "logit_bias", f"numbers from -100 to 100 by tokens below {vocabulary}", bias)


class Checked:
    """What differs from transformers' handlers: a wrong request is answered by 400 and says why, `stop` ends a text
    before the stop string, a temperature above 0 draws tokens, and an answer may fill the context."""

    needed: str
    chat = False

    def check(self, body: dict) -> None:
        unknown = sorted(body.keys() - self._valid_params_class.__mutable_keys__)
        if unknown:
            raise Refused(400, f"unknown fields: {', '.join(map(shortened, unknown))}", param=unknown[0])
        self.model_manager.check_name(body.get("model"))
        expect(body.get(self.needed) is not None, self.needed, "a value", None)
        for name, (what, test) in FIELDS.items():
            if body.get(name) is not None:
                expect(test(body[name]), name, what, body[name])
        model = self.model_manager.model
        if body.get("logit_bias") is not None:
            check_bias(body["logit_bias"], model.config.get_text_config().vocab_size)
        if self.batched:
            for name in NOT_BATCHED:
                expect(not body.get(name), name, "none, since the server batches requests", body.get(name))
        if "messages" in body:
            modality = self.model_manager.get_model_modality(model, self.model_manager.processor)
            check_messages(body["messages"], modality != Modality.LLM)

    @property
    def batched(self) -> bool:
        return self.generation_state._continuous_batching

    async def handle_request(self, body: dict, request_id: str):
        body = {name: value for name, value in body.items() if value is not None}
        try:
            self.check(body)
            self.prepare(body)
            return await super().handle_request(body, f"{type(self).prefix}{uuid.uuid4().hex}")
        except (HTTPException, CBWorkerDeadError):
            raise
        except Failed as error:
            if "generation_config" in body:
                raise Refused(400, f"generation_config: {error}", param="generation_config") from None
            raise
        except Exception as error:  # the template's, the tokenizer's, or that of a field of a wrong form within another
            raise Refused(400, f"{type(error).__name__}: {error}") from error

    def prepare(self, body: dict) -> None:
        request = current.get()
        request.stops, request.seed, request.chat = listed(body.pop("stop", None)), body.pop("seed", None), self.chat
        body.setdefault("stream", False)
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        for message in body.get("messages", ()):
            if message["role"] == "developer":  # which only the newest templates know
                message["role"] = "system"

    def _resolve_model(self, body: dict):
        manager = self.model_manager
        body["model"] = manager.force_model
        return manager.force_model, manager.model, manager.processor

    def _build_generation_config(self, body: dict, defaults: GenerationConfig, use_cb: bool = False) -> GenerationConfig:
        config = super()._build_generation_config(body, defaults, use_cb=use_cb)
        if not any(name in body for name in LIMITS):
            config.max_new_tokens = defaults.max_new_tokens
        if "temperature" in body or "top_p" in body:
            config.do_sample = body.get("temperature") != 0
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        return config


class Chat(Checked, ChatCompletionHandler):
    needed, chat, prefix = "messages", True, "chatcmpl-"

    async def handle_request(self, body: dict, request_id: str):
        return with_end(await super().handle_request(body, request_id))

    def _build_completion(self, request_id: str, content: str, *args, **kwargs) -> dict:
        return super()._build_completion(request_id, cut(content, current.get().stops), *args, **kwargs)


class Completions(Checked, CompletionHandler):
    needed, prefix = "prompt", "cmpl-"

    async def handle_request(self, body: dict, request_id: str):
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            body = body | {"prompt": prompt[0]}
        return with_end(await super().handle_request(body, request_id))


class Responses(Checked, ResponseHandler):
    needed, chat, prefix = "input", True, ""


#: How transformers begins an error in a stream. What follows it is not escaped.
ERROR = 'data: {"error": "'


def with_end(response):
    """OpenAI's streams end with a line for which some clients wait, and an error in them is an object."""

    async def ended(parts: AsyncIterator[str]) -> AsyncIterator[str]:
        async with contextlib.aclosing(parts):
            async for part in parts:
                before, mark, told = part.partition(ERROR)
                yield before + as_data(problem(told.removesuffix('"}\n\n'), 500)) if mark else part
        yield "data: [DONE]\n\n"

    if isinstance(response, StreamingResponse):
        response.body_iterator = ended(response.body_iterator)
    return response


def as_data(value: dict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def problem(message: str, status: int, code: str | None = None, param: str | None = None) -> dict:
    """An error as OpenAI tells it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    told = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: value and readable(value) for name, value in told.items()}}


def readable(text: str) -> str:
    """Without halves of characters, which JSON may have, and UTF-8 has not."""
    return text.encode(errors="replace").decode()
