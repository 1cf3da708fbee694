"""What all endpoints that generate share: every field is checked, and transformers' handlers answer."""

import asyncio
import copy
import functools
import json
import logging
import uuid
from contextvars import Context

from fastapi.responses import JSONResponse
from transformers import BatchEncoding, GenerationConfig
from transformers.cli.serving.utils import Modality

from . import fields, prompts
from .answers import with_reused, with_reused_in
from .choices import joined, joined_streams, split
from .constraints import Constraint, lark
from .logprobs import Recorder
from .messages import check_conversation
from .parsing import LenientTokenizer
from .requests import Refused, current
from .sampling import Penalties
from .values import as_list, expect, shortened

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
        self.strict, self.constraints = strict, models.constraints
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
        contexts = split(body.get("n", 1))
        return body, inputs, [(each, each.run(self.prepare, body, i, inputs)) for i, each in enumerate(contexts)]

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

    def prepare(self, body: dict, index: int, inputs: BatchEncoding) -> GenerationConfig:
        """Note what this answer of the request asks for."""
        request, config, seed = current.get(), self.config(body), body.get("seed")
        self.manager.limit(inputs, config)
        request.chat, request.seed = self.chat, (seed + index) % 2**63 if index and seed is not None else seed
        request.stops = as_list(body.get("stop", []))
        request.one_call = body.get("parallel_tool_calls") is False
        request.recorder, request.entries = self.recorder(body), []
        penalties = Penalties(
            {int(token): float(value) for token, value in body.get("logit_bias", {}).items()},
            float(config.repetition_penalty or 1),
            float(body.get("presence_penalty", 0)),
            float(body.get("frequency_penalty", 0)),
        )
        config.repetition_penalty = None
        request.constraint = self.constraint(body, flat(ids_of(inputs)))
        if request.constraint is not None:
            check_ends(body, config)
        request.changes = [each for each in (request.recorder, penalties, request.constraint) if each]
        return config

    def constraint(self, body: dict, input_ids: list[int]) -> Constraint | None:
        grammar = body.get("grammar")
        return None if grammar is None else self.constraints.make("grammar", None, lark(grammar))

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
        own = [] if own is None or body.get("ignore_eos") else as_list(own)
        return [*own, *body.get("stop_token_ids", ())] or [self.vocabulary]


def check_ends(body: dict, config: GenerationConfig) -> None:
    """Refuse what would forbid the only tokens that a grammar allows."""
    expect(not body.get("ignore_eos"), "ignore_eos", "no value with an answer of a given form", True)
    others = [name for name in ("min_new_tokens", "no_repeat_ngram_size") if getattr(config, name, None)]
    expect(not others, "generation_config", "no such setting with an answer of a given form", others)


def ids_of(inputs: BatchEncoding) -> list:
    ids = inputs["input_ids"]
    return ids if isinstance(ids, list) else ids.tolist()


def flat(ids: list) -> list[int]:
    """A processor returns a batch, a tokenizer the tokens."""
    return ids[0] if ids and isinstance(ids[0], list) else ids
