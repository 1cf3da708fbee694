"""Requests: transformers' handlers answer them, after a check of every field."""

import asyncio
import contextlib
import functools
import inspect
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBWorkerDeadError, Modality
from transformers.generation import GenerationMode

from .generation import Failed, Refused, current
from .stopping import cut

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ITEMS = ("input_text", "output_text", "text", "reasoning", "function_call", "function_call_output")


def of_type(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def is_integer(value: object) -> bool:
    return type(value) is int  # a bool is an int, too


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**64  # not NaN either


def is_count(value: object) -> bool:
    return is_integer(value) and 0 < value < 2**63


def is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


#: What each field must be if it is given: in words, and as a test.
FIELDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "model": ("a string", of_type(str)),
    "messages": ("a list of messages, at least one", lambda value: isinstance(value, list) and len(value) > 0),
    "prompt": ("a string", of_type(str)),
    "input": ("a string or a list, not empty", lambda value: isinstance(value, str | list) and len(value) > 0),
    "suffix": ("a string", of_type(str)),
    "instructions": ("a string", of_type(str)),
    "generation_config": ("a string of JSON", of_type(str)),
    "chat_template_kwargs": ("an object", of_type(dict)),
    "stream": ("true or false", of_type(bool)),
    "max_tokens": ("an integer of at least 1", is_count),
    "max_completion_tokens": ("an integer of at least 1", is_count),
    "max_output_tokens": ("an integer of at least 1", is_count),
    "temperature": ("a number from 0 to 2", lambda value: is_number(value) and 0 <= value <= 2),
    "top_p": ("a number above 0, up to 1", lambda value: is_number(value) and 0 < value <= 1),
    "frequency_penalty": ("a number above -1, up to 2", lambda value: is_number(value) and -1 < value <= 2),
    "presence_penalty": ("a number from -2 to 2", lambda value: is_number(value) and -2 <= value <= 2),
    "seed": ("an integer of 64 bits", lambda value: is_integer(value) and -(2**63) <= value < 2**63),
    "stop": (
        "a string or a list of strings, none of them empty",
        lambda value: (isinstance(value, str) or is_list_of(value, str)) and all(as_list(value)),
    ),
    "tools": ("a list of objects", lambda value: is_list_of(value, dict)),
    "n": ("1: other numbers of answers are not supported", lambda value: value == 1),
    "best_of": ("1: other numbers of answers are not supported", lambda value: value == 1),
    "echo": ("false: true is not supported", lambda value: value is False),
    "logprobs": ("null or false: log probabilities are not supported", lambda value: value is False),
    "response_format": (
        "{'type': 'text'}: other formats are not supported",
        lambda value: isinstance(value, dict) and value.get("type") == "text",
    ),
}
#: transformers can apply these to all requests of a batch or to none.
NOT_BATCHED = ("frequency_penalty", "logit_bias")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")


def as_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def expect(right: bool, name: str, expected: str, got: object) -> None:
    if not right:
        raise Refused(400, f"{name}: expected {expected}, got {shortened(got)}", param=name)


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_messages(messages: list, takes_images: bool) -> None:
    for i, message in enumerate(messages):
        expect(isinstance(message, dict), f"messages[{i}]", "an object", message)
        role, content, name = message.get("role"), message.get("content"), f"messages[{i}].content"
        expect(role in ROLES, f"messages[{i}].role", f"one of {', '.join(ROLES)}", role)
        optional = role in ("assistant", "tool", "function")
        right = isinstance(content, str | list) or (optional and content is None)
        expect(right, name, "a string or a list of parts", content)
        for part in content if isinstance(content, list) else ():
            known = isinstance(part, dict) and isinstance(part.get("type"), str)
            expect(known, name, "parts that have a type", part)
            if part["type"] == "text":
                expect(isinstance(part.get("text"), str), name, "a text in a part of type text", part)
            else:
                expect(takes_images, name, "parts of type text only, as the model takes no others", part["type"])


def check_input(items: list, takes_images: bool) -> None:
    """The items of /v1/responses: messages, parts of one message, and tool calls with their results."""
    for i, item in enumerate(items):
        right = isinstance(item, dict) and ("role" in item or isinstance(item.get("type"), str))
        expect(right, f"input[{i}]", "an object with a role or a type", item)
        if "role" in item:
            expect(item["role"] in ROLES, f"input[{i}].role", f"one of {', '.join(ROLES)}", item["role"])
        elif not takes_images:
            expect(item["type"] in ITEMS, f"input[{i}].type", f"one of {', '.join(ITEMS)}", item["type"])


def check_bias(bias: object, vocabulary: int) -> None:
    def fits(token: str, value: object) -> bool:
        is_token = token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary
        return is_token and is_number(value) and abs(value) <= 100

    right = isinstance(bias, dict) and all(fits(token, value) for token, value in bias.items())
    expect(right, "logit_bias", f"an object with token ids below {vocabulary} and numbers from -100 to 100", bias)


class Checked:
    """The differences from transformers' handlers: a wrong request gets status 400 and a reason, `stop` ends a text
    before the stop string, a temperature above 0 turns sampling on, and an answer may fill the context."""

    required: str
    chat = False

    def check(self, body: dict) -> None:
        unknown = sorted(body.keys() - self._valid_params_class.__mutable_keys__)
        if unknown:
            raise Refused(400, f"unknown fields: {', '.join(map(shortened, unknown))}", param=unknown[0])
        self.model_manager.check_name(body.get("model"))
        expect(self.required in body, self.required, "a value", None)
        for name, (expected, test) in FIELDS.items():
            if name in body:
                expect(test(body[name]), name, expected, body[name])
        model = self.model_manager.model
        if "logit_bias" in body:
            check_bias(body["logit_bias"], model.config.get_text_config().vocab_size)
        if self.generation_state._continuous_batching:
            for name in NOT_BATCHED:
                expect(not body.get(name), name, "no value with continuous batching", body.get(name))
        takes_images = self.model_manager.get_model_modality(model, self.model_manager.processor) != Modality.LLM
        if "messages" in body:
            check_messages(body["messages"], takes_images)
        if isinstance(body.get("input"), list):
            check_input(body["input"], takes_images)

    async def handle_request(self, body: dict, request_id: str):
        request_id = f"{self.prefix}{uuid.uuid4().hex}"
        try:
            answer = await asyncio.to_thread(self.begin, body, request_id)
            return await answer()
        except (HTTPException, CBWorkerDeadError):
            raise
        except Failed as error:
            if "generation_config" in body:
                raise Refused(400, f"generation_config: {error}", param="generation_config") from None
            raise
        except Exception as error:  # of the chat template, the tokenizer, or of a wrong value inside a field
            raise Refused(400, f"{type(error).__name__}: {error}") from error

    def begin(self, body: dict, request_id: str) -> Callable[[], Awaitable]:
        """All that precedes the answer: check and tokenise. It may take seconds, so it runs in a thread."""
        body = {name: value for name, value in body.items() if value is not None}
        self.check(body)
        self.prepare(body)
        try:
            super().handle_request(body, request_id).send(None)  # a coroutine that does not wait for anything
        except StopIteration as end:
            return end.value
        raise RuntimeError("transformers' handler waits before it calls `_streaming` or `_non_streaming`")

    def _streaming(self, *args, **kwargs) -> Callable[[], Awaitable]:
        start = super()._streaming
        check_length(start, *args, **kwargs)

        async def answer() -> StreamingResponse:  # on the event loop
            return start(*args, **kwargs)

        return answer

    async def _non_streaming(self, *args, **kwargs) -> Callable[[], Awaitable]:
        check_length(super()._non_streaming, *args, **kwargs)
        return functools.partial(super()._non_streaming, *args, **kwargs)

    def prepare(self, body: dict) -> None:
        request = current.get()
        request.stops, request.seed, request.chat = as_list(body.pop("stop", None)), body.pop("seed", None), self.chat
        body.setdefault("stream", False)
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        for message in body.get("messages", ()):
            if message["role"] == "developer":  # which only the newest templates know
                message["role"] = "system"

    def _resolve_model(self, body: dict):
        manager = self.model_manager
        body["model"] = manager.force_model
        return manager.force_model, manager.on_host, manager.processor

    def _build_generation_config(self, body: dict, defaults: GenerationConfig, use_cb: bool = False):
        config = super()._build_generation_config(body, defaults, use_cb=use_cb)
        if not any(name in body for name in LIMITS):
            config.max_new_tokens = defaults.max_new_tokens
        if "temperature" in body or "top_p" in body:
            config.do_sample = body.get("temperature") != 0
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        plain = config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        plain = plain and config.num_return_sequences in (None, 1)
        expect(plain, "generation_config", "greedy search or sampling of one answer", body.get("generation_config"))
        return config


def check_length(answer: Callable, *args, **kwargs) -> None:
    """Refuse a prompt that does not fit before its answer begins: on the event loop, transformers decodes it first."""
    given = inspect.signature(answer).bind(*args, **kwargs).arguments
    given["gen_manager"].limit(given["inputs"], given["gen_config"])


class Chat(Checked, ChatCompletionHandler):
    required, chat, prefix = "messages", True, "chatcmpl-"

    async def handle_request(self, body: dict, request_id: str):
        return as_openai_stream(await super().handle_request(body, request_id))

    def _build_completion(self, request_id: str, content: str, *args, **kwargs) -> dict:
        return super()._build_completion(request_id, cut(content, current.get().stops), *args, **kwargs)


class Completions(Checked, CompletionHandler):
    required, prefix = "prompt", "cmpl-"

    async def handle_request(self, body: dict, request_id: str):
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            body = body | {"prompt": prompt[0]}
        return as_openai_stream(await super().handle_request(body, request_id))


class Responses(Checked, ResponseHandler):
    required, chat, prefix = "input", True, ""


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
