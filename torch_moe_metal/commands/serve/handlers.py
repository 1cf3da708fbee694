"""Requests: transformers' handlers answer them, after a check of every field."""

import asyncio
import contextlib
import copy
import functools
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator
from contextvars import Context

from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from transformers import BatchEncoding, GenerationConfig
from transformers.cli.serving import chat_completion, completion, response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import Modality

from ..common.prefixes import cuts
from . import fields, prompts
from .choices import joined, joined_streams, split
from .fields import expect, shortened
from .logprobs import Recorder, Scored, as_text
from .messages import check_conversation
from .parsing import LenientTokenizer
from .requests import Refused, current
from .sampling import Penalties

logger = logging.getLogger("uvicorn.error")
MAX_LOGGED = 100  # names of ignored fields
#: A request with one of these draws its tokens.
DRAWN = ("temperature", "top_p", "top_k", "min_p")
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # the first one counts
FLOATS = ("temperature", "top_p", "min_p", "typical_p")


class Checked:
    """The differences from transformers' handlers: a wrong request gets status 400 and a reason, the prompt is made off
    the event loop, fields of other servers have an effect, and an answer may fill the context."""

    fields: dict[str, fields.Field]
    required: str
    chat = False

    def __init__(self, models, generation, strict: bool = False):
        super().__init__(models, generation)
        self.strict = strict
        self.vocabulary = models.model.config.get_text_config().vocab_size
        self.modality = models.get_model_modality(models.model, models.processor)
        self.batched = generation.use_continuous_batching(models.model, self.modality)
        self.manager = generation.get_manager(models.force_model, use_cb=self.batched)

    async def handle_request(self, body: dict, request_id: str):
        """As transformers' own."""
        models = self.model_manager
        body, inputs, choices = await prompts.made(functools.partial(self.begin, body))
        arguments = {
            "model": models.model,
            "processor": models.processor,
            "model_id": models.force_model,
            "inputs": inputs,
            "gen_manager": self.manager,
            **self.arguments(body),
        }
        if body.get("stream"):
            response = joined_streams(
                [
                    context.run(self._streaming, **arguments, request_id=self.new_id(), gen_config=config)
                    for context, config in choices
                ]
            )
            response.body_iterator = with_reused_in(response.body_iterator)
            return response
        answers = await self.whole_answers(arguments, choices)
        return JSONResponse(with_reused(joined(answers) if len(answers) > 1 else answers[0]))

    async def whole_answers(self, arguments: dict, choices: list[tuple[Context, GenerationConfig]]) -> list[dict]:
        tokenizer = LenientTokenizer(self.model_manager.processor, current.get().stops)

        async def one(config: GenerationConfig) -> dict:
            given = arguments | {"processor": tokenizer, "request_id": self.new_id(), "gen_config": config}
            return self.completed(json.loads((await self._non_streaming(**given)).body))

        return await asyncio.gather(*(asyncio.create_task(one(config), context=each) for each, config in choices))

    def completed(self, answer: dict) -> dict:
        """The answer with what transformers leaves out."""
        return answer

    def new_id(self) -> str:
        return f"{self.prefix}{uuid.uuid4().hex}"

    def begin(self, body: dict) -> tuple[dict, BatchEncoding, list[tuple[Context, GenerationConfig]]]:
        """All that precedes the answer, which may take seconds: the known fields, the settings of each answer, and the
        prompt. A prompt that does not fit is refused here, since transformers decodes it on the event loop."""
        body = self.known({name: value for name, value in body.items() if value is not None}, self.fields)
        self.check(body)
        current.get().required = self.required
        inputs = self.inputs(body)
        choices = [(context, context.run(self.prepare, body, i)) for i, context in enumerate(split(body.get("n", 1)))]
        for context, config in choices:
            context.run(self.manager.limit, inputs, config)
        return body, inputs, choices

    def known(self, body: dict, table: dict[str, fields.Field]) -> dict:
        """The fields that are in the table. Others are ignored."""
        unknown = [name for name in body if name not in table]
        if unknown and self.strict:
            raise Refused(400, f"unknown fields: {shortened(', '.join(unknown))}", param=unknown[0][:100])
        for name in {shortened(name) for name in unknown} - self.model_manager.ignored:
            if len(self.model_manager.ignored) < MAX_LOGGED:
                self.model_manager.ignored.add(name)
                logger.warning("Requests have an unknown field, which is ignored: %s", name)
        return {name: value for name, value in body.items() if name in table}

    def check(self, body: dict) -> None:
        self.model_manager.check_name(body.get("model"))
        expect(self.required in body, self.required, "a value", None)
        fields.check(body, self.fields)
        prompts.check_variables(body.get("chat_template_kwargs", {}))
        for name in ("logit_bias", "stop_token_ids"):
            right = all(self.is_token(token) for token in body.get(name, ()))
            expect(right, name, f"token ids below {self.vocabulary}", body.get(name))
        check_conversation(body, takes_images=self.modality != Modality.LLM)

    def is_token(self, token: str | int) -> bool:
        is_id = isinstance(token, int) or (token.isascii() and token.isdigit() and len(token) < 10)
        return is_id and 0 <= int(token) < self.vocabulary

    def prepare(self, body: dict, index: int) -> GenerationConfig:
        """Note what this answer of the request asks for."""
        request, config, seed = current.get(), self.config(body), body.get("seed")
        request.chat, request.seed = self.chat, (seed + index) % 2**63 if index and seed is not None else seed
        request.stops = fields.as_list(body.get("stop", []))
        request.one_call = body.get("parallel_tool_calls") is False
        request.recorder, request.entries = self.recorder(body), []
        penalties = Penalties(
            {int(token): float(value) for token, value in body.get("logit_bias", {}).items()},
            float(config.repetition_penalty or 1),
            float(body.get("presence_penalty", 0)),
            float(body.get("frequency_penalty", 0)),
        )
        config.repetition_penalty = None
        request.changes = [each for each in (request.recorder, penalties) if each]
        return config

    def recorder(self, body: dict) -> Recorder | None:
        most = self.likeliest(body)
        processor = self.model_manager.processor
        return None if most is None else Recorder(most, getattr(processor, "tokenizer", processor).decode)

    def likeliest(self, body: dict) -> int | None:
        """For how many of the likeliest tokens a request wants log probabilities, besides those of its answer."""
        return None

    def config(self, body: dict) -> GenerationConfig:
        """The model's own settings, with those of the request."""
        config = copy.deepcopy(self.model_manager.model.generation_config)
        chosen = fields.read_settings(body.get("generation_config", "{}"), self.batched)
        chosen |= {name: body[name] for name in (*DRAWN, "repetition_penalty") if name in body}
        chosen |= {"do_sample": True} if any(name in body for name in DRAWN) else {}
        for limit in [body[name] for name in LIMITS if name in body][:1]:
            chosen["max_new_tokens"] = limit
        for name, value in chosen.items():
            setattr(config, name, float(value) if name in FLOATS else value)
        config.eos_token_id = self.ends(body, config.eos_token_id)
        config.top_k = max(config.top_k or 0, 0)
        if not config.do_sample or (config.temperature is not None and config.temperature < fields.LEAST_TEMPERATURE):
            config.do_sample = False
            config.temperature = config.top_p = config.top_k = config.min_p = config.typical_p = None
        return config

    def ends(self, body: dict, own: int | list[int] | None) -> list[int]:
        """The tokens that end the answer. If there is none, `generate` takes the model's own, so this is an id of no
        token then."""
        own = [] if own is None or body.get("ignore_eos") else fields.as_list(own)
        return [*own, *body.get("stop_token_ids", ())] or [self.vocabulary]


class OfChats(Checked):
    """The two endpoints whose prompt is made by the model's chat template."""

    chat = True

    def inputs(self, body: dict) -> BatchEncoding:
        processor, tools = self.model_manager.processor, self.tools(body)
        messages = self.inputs_of(self.messages(body))
        effort = body.get("reasoning_effort", body.get("reasoning", {}).get("effort"))
        values = prompts.variables(processor, tools, body.get("chat_template_kwargs", {}), effort)
        video = False
        if self.modality != Modality.LLM:
            video = any(part.get("type") == "video" for message in messages for part in message["content"])
            values["load_audio_from_video"] = video and self.modality == Modality.MULTIMODAL
            values |= {"num_frames": 32} if video else {}  # as transformers' own handler

        def encode(messages: list[dict], answers: bool, as_tensors: str | None) -> BatchEncoding:
            return processor.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=answers,
                tokenize=True,
                return_dict=True,
                return_tensors=as_tensors,
                **values,
            )

        inputs = encode(messages, True, None if self.batched else "pt")
        if not self.batched and self.manager.needs_cuts(inputs):
            ids = inputs["input_ids"][0].tolist()
            current.get().cuts = cuts(messages, ids, lambda *given: flat(encode(*given, None)["input_ids"]))
        return inputs

    def inputs_of(self, messages: list[dict]) -> list[dict]:
        """transformers' own, with the reasoning, and the text before a call of a tool."""
        made = self.get_processor_inputs_from_messages(messages, self.modality)
        bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        for message, given, plain in zip(
            made, messages, self.get_processor_inputs_from_messages(bare, self.modality), strict=True
        ):
            message["content"] = plain["content"]
            if isinstance(given.get("reasoning_content"), str):
                message["reasoning_content"] = given["reasoning_content"]
        return made

    def tools(self, body: dict) -> list[dict] | None:
        return None if body.get("tool_choice") == "none" else body.get("tools") or None

    def arguments(self, body: dict) -> dict:
        return {"tools": self.tools(body)}


def flat(ids: list) -> list[int]:
    """A processor returns a batch, a tokenizer the tokens."""
    return ids[0] if ids and isinstance(ids[0], list) else ids


def cleaned(message: dict) -> dict:
    """The message without empty fields, for which transformers drops the content."""
    found = {
        name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])
    }
    return found | {"role": "system"} if found.get("role") == "developer" else found  # only new templates know it


class Chat(OfChats, ChatCompletionHandler):
    fields, required, prefix = fields.CHAT, "messages", "chatcmpl-"

    async def handle_request(self, body: dict, request_id: str):
        return as_openai_stream(await super().handle_request(body, request_id))

    def messages(self, body: dict) -> list[dict]:
        return [cleaned(message) for message in body["messages"]]

    def check(self, body: dict) -> None:
        super().check(body)
        right = body.get("logprobs") or not body.get("top_logprobs")
        expect(right, "top_logprobs", "a value only with logprobs", body.get("top_logprobs"))

    def likeliest(self, body: dict) -> int | None:
        return body.get("top_logprobs", 0) if body.get("logprobs") else None

    def completed(self, answer: dict) -> dict:
        if current.get().recorder is not None:
            answer["choices"][0]["logprobs"] = {"content": current.get().entries, "refusal": None}
        return answer

    def _build_chunk_sse(self, request_id: str = "", content: str | None = None, **options) -> str:
        event = super()._build_chunk_sse(request_id, content, **options)
        scored = isinstance(content, Scored)
        return with_logprobs(event, {"content": content.entries, "refusal": None}) if scored else event


class Completions(Checked, CompletionHandler):
    fields, required, prefix = fields.COMPLETIONS, "prompt", "cmpl-"

    async def handle_request(self, body: dict, request_id: str):
        return as_openai_stream(await super().handle_request(body, request_id))

    def begin(self, body: dict):
        prompt = body.get("prompt")
        one = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str)
        return super().begin(body | {"prompt": prompt[0]} if one else body)

    def inputs(self, body: dict) -> BatchEncoding:
        processor = self.model_manager.processor
        return getattr(processor, "tokenizer", processor)(body["prompt"], return_tensors=None if self.batched else "pt")

    def arguments(self, body: dict) -> dict:
        return {}

    def likeliest(self, body: dict) -> int | None:
        return None if body.get("logprobs") is False else body.get("logprobs")

    def completed(self, answer: dict) -> dict:
        if current.get().recorder is not None:
            answer["choices"][0]["logprobs"] = as_text(current.get().entries)
        return answer

    def _build_chunk_sse(self, request_id: str, model_id: str, text: str = "", **options) -> str:
        event = super()._build_chunk_sse(request_id, model_id, text, **options)
        return with_logprobs(event, as_text(text.entries, text.start)) if isinstance(text, Scored) else event


class Responses(OfChats, ResponseHandler):
    fields, required, prefix = fields.RESPONSES, "input", ""

    def messages(self, body: dict) -> list[dict]:
        items = body["input"]
        return self._normalize_input(
            body | {"input": [cleaned(item) for item in items] if type(items) is list else items}
        )

    def tools(self, body: dict) -> list[dict] | None:
        return self._normalize_tools(super().tools(body))

    def arguments(self, body: dict) -> dict:
        return {"body": body, "tools": self.tools(body)}


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
