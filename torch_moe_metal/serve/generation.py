"""How the server generates: transformers' managers, with stop strings, seeds, a limit of context, and an end for each
request, however it comes.

transformers' two managers run `generate` for one request after the other, or all requests together in a paged cache.
Both answer with a queue of texts. Ours differ from them in what the text is cut by, and in that an answer which is not
streamed comes from the same queue, so that it can be stopped as well.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    _StreamError,
    build_response_parser,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

from ..bench.calls import Unfit

PAGE = 256  # tokens of a page of the paged cache, as transformers has it
MOST_BATCHED = 1024  # tokens of a step of continuous batching: prompts come in pieces of so many
STOPPED = "the server is shutting down"


class Refused(HTTPException):
    """A request that cannot be answered, as OpenAI says it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(status, message)
        self.code, self.param = code, param


class Failed(RuntimeError):
    """Generation itself went wrong."""


@dataclass(eq=False)
class Request:
    """What a request wants that `GenerationConfig` does not say, and what generates its answer."""

    stops: list[str] = field(default_factory=list)
    seed: int | None = None
    chat: bool = False
    cancel: Callable[[], None] = lambda: None
    fail: Callable[[str], None] = lambda _why: None

    def started(self, streamer: "OneStreamer | BatchedStreamer", put: Callable[[object], None]) -> None:
        self.cancel = streamer.cancel
        self.fail = lambda why: (put(_StreamError(why)), streamer.cancel())


#: Of the task that serves it. The server makes one for each request.
current: ContextVar[Request] = ContextVar("current")


class Until:
    """The texts before the first stop string. What may be the beginning of one is held back."""

    def __init__(self, stops: list[str]):
        self.stops, self.held, self.found = stops, "", False

    def passed(self, item: object) -> list[object]:
        """What may be shown now. Behind a stop string, None ends the answer."""
        if not self.stops:
            return [item]
        if type(item) is not str:  # thoughts are a class of their own
            held, self.held = self.held, ""
            return [held, item] if held else [item]
        text = self.held + item
        if (end := first_of(self.stops, text)) is not None:
            self.held, self.found = "", True
            return [text[:end], None] if end else [None]
        begun = max(begins(stop, text) for stop in self.stops)
        self.held = text[len(text) - begun :]
        return [text[: len(text) - begun]] if begun < len(text) else []


def first_of(stops: list[str], text: str) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def begins(stop: str, text: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def cut(text: str, stops: list[str]) -> str:
    end = first_of(stops, text)
    return text if end is None else text[:end]


class OneStreamer(DirectStreamer):
    """`generate` calls it with each token."""

    def __init__(self, *args, until: Until, **kwargs):
        self.until, self.ids = until, []
        super().__init__(*args, **kwargs)

    def put(self, value: torch.Tensor) -> None:
        if not self._first:
            self.ids += value.tolist()
        super().put(value)

    def _enqueue(self, item: object) -> None:
        for each in self.until.passed(item):
            super()._enqueue(each)
        if self.until.found:
            raise _GenerationCancelled


class Cutting(asyncio.Queue):
    """A queue of texts up to a stop string."""

    def __init__(self, until: Until):
        super().__init__()
        self.until = until

    def put_nowait(self, item: object) -> None:
        for each in self.until.passed(item):
            super().put_nowait(each)
        if self.until.found:
            raise _GenerationCancelled


class BatchedStreamer(CBStreamer):
    """Continuous batching calls it with all tokens so far."""

    ids: list[int] = []  # noqa: RUF012, replaced and never written
    ended = False

    def take(self, output) -> None:
        if self.ended:
            return
        self.ids = output.generated_tokens
        try:
            self.put(output)
            if output.error is not None:
                self._queue.put_nowait(_StreamError(output.error))
            if output.error is not None or output.is_finished():
                self.ended = True
                self.end()
        except _GenerationCancelled:
            self.cancel()

    def cancel(self) -> None:
        """transformers keeps the handler of a request that is cancelled."""
        if not self.ended:
            self.ended = True
            super().cancel()
        with self._cb.output_router._lock:
            self._cb.output_router.result_handlers.pop(self._request_id, None)


class Drained:
    """An answer in one piece is the end of a stream."""

    context: int

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        request = current.get()
        parser = build_response_parser(processor, model, inputs["input_ids"]) if request.stops and request.chat else None
        queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id, parser)
        while (item := await queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise Failed(item.msg)
        ids = streamer.ids[: streamer.total_tokens]
        text = processor.decode(ids, skip_special_tokens=True)
        return cut(text, request.stops), length_of(inputs), ids

    def limit(self, inputs: dict, gen_config: GenerationConfig) -> None:
        """Refuse what does not fit the context, and end the answer where the context ends."""
        length = length_of(inputs)
        if length == 0:
            raise Refused(400, "the prompt has no tokens", param="prompt")
        if length >= self.context:
            told = f"expected a prompt of fewer than {self.context} tokens, which is the context, got {length}"
            raise Refused(400, told, "context_length_exceeded", "messages" if current.get().chat else "prompt")
        gen_config.max_length, room = None, self.context - length
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)


def length_of(inputs: dict) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else ids.shape[-1]


def rust_tokenizer(processor):
    return getattr(processor, "tokenizer", processor)._tokenizer


class OneByOne(Drained, GenerateManager):
    """Requests wait for one another."""

    def __init__(self, context: int):
        super().__init__()
        self.context = context

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self.limit(inputs, gen_config)
        request, loop, queue = current.get(), asyncio.get_running_loop(), asyncio.Queue()
        until = Until(request.stops)
        streamer = OneStreamer(rust_tokenizer(processor), loop, queue, response_parser, until=until)
        how = {**inputs, "streamer": streamer, "generation_config": gen_config, "tokenizer": processor}
        how |= {"generation_mode": "text"} if hasattr(model, "has_talker") else {}

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            try:
                if request.seed is not None:  # here, since the requests before this one take random numbers, too
                    torch.manual_seed(request.seed)
                model.generate(**how)
            except _GenerationCancelled:
                put(None)
            except Exception as error:
                put(_StreamError(str(error)))

        request.started(streamer, put)
        self.submit(run)
        return queue, streamer

    def stop(self) -> None:
        """Wait for the thread, which would otherwise be ended in the middle of an op."""
        with contextlib.suppress(TimeoutError):
            self.submit(lambda: None).result(timeout=30)


class Together(Drained, CBGenerateManager):
    """Continuous batching: each step computes a token of every request."""

    def __init__(self, context: int, cb_config: ContinuousBatchingConfig):
        super().__init__(cb_config)
        self.context = context

    def init_cb(self, model, gen_config=None) -> None:
        if self._cb is not None:
            return
        # All three are there for each request to have its own, which needs a value now that does something.
        shared = GenerationConfig(do_sample=True, temperature=0.5, top_k=1, top_p=0.5, eos_token_id=-1)
        self._cb = model.init_continuous_batching(shared, self._cb_config)
        processors = self._cb.logit_processor
        processors.logits_processor[:] = map(quick, processors.logits_processor)
        self._cb.start()
        while self._cb.batch_processor is None and self.is_alive():  # its thread allocates the cache
            time.sleep(0.01)
        if not self.is_alive():
            raise Unfit(f"--continuous-batching: {self._cb.background_thread_status.fatal_error}")

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self._check_alive(request_id)
        self.limit(inputs, gen_config)
        request, loop = current.get(), asyncio.get_running_loop()
        queue = Cutting(Until(request.stops))
        streamer = BatchedStreamer(self._cb, request_id, rust_tokenizer(processor), loop, queue, response_parser)
        self._cb.register_result_handler(request_id, streamer.take)
        request.started(streamer, lambda item: loop.call_soon_threadsafe(queue.put_nowait, item))
        self._cb.add_request(
            inputs["input_ids"],
            request_id=request_id,
            streaming=True,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            **sampling(gen_config, model.config.get_text_config().vocab_size),
        )
        return queue, streamer

    def stop(self) -> None:
        if self._cb is not None:
            self._cb.stop(block=True, timeout=30, hard_stop=True)


def sampling(config: GenerationConfig, vocabulary: int) -> dict[str, float | int]:
    """A request's own. The likeliest token is that of the first one alone."""
    if not config.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    top_k = config.top_k or vocabulary
    return {"temperature": config.temperature or 1.0, "top_k": min(top_k, vocabulary), "top_p": config.top_p or 1.0}


def quick(processor):
    """transformers' processor, which sorts the vocabulary no more than it has to."""
    if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
        processor.__class__ = QuickTopK
    elif isinstance(processor, ContinuousBatchingTopPLogitsWarper):
        processor.__class__ = QuickTopP
    return processor


class QuickTopK(ContinuousBatchingTopKLogitsWarper):
    least, most = 0, sys.maxsize

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        found = super().prepare_tensor_args(requests)
        if len(found):
            self.least, self.most = int(found.min()), int(found.max())
        return found

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if self.least >= scores.shape[-1]:
            return scores
        if self.most > scores.shape[-1] // 8:
            return super().__call__(scores, tensor_arg)
        last = (tensor_arg[: scores.shape[0]] - 1).clamp(0, self.most - 1).long()[:, None]
        return scores.masked_fill(scores < scores.topk(self.most).values.gather(-1, last), self.filter_value)


class QuickTopP(ContinuousBatchingTopPLogitsWarper):
    least = 0.0

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        found = super().prepare_tensor_args(requests)
        if len(found):
            self.least = float(found.view(torch.float32).min())
        return found

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return scores if self.least >= 1.0 else super().__call__(scores, tensor_arg)


class Generation(GenerationState):
    """transformers' state, of one model and the requests that are being answered."""

    def __init__(self, context: int, continuous_batching: bool):
        pages = math.ceil(context / PAGE) + 1
        how = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages, max_batch_tokens=min(MOST_BATCHED, pages * PAGE), per_request_processors=True
        )
        super().__init__(continuous_batching=continuous_batching, cb_config=how)
        self.context = context
        self.requests: set[Request] = set()
        self._one_by_one: OneByOne | None = None

    def get_manager(self, model_id: str, use_cb: bool = False) -> OneByOne | Together:
        if use_cb:
            self._cb_manager = self._cb_manager or Together(self.context, self._cb_config)
            return self._cb_manager
        self._one_by_one = self._one_by_one or OneByOne(self.context)
        return self._one_by_one

    def fail_all(self) -> None:
        """What a signal may call at any time."""
        for request in list(self.requests):
            request.fail(STOPPED)

    def shutdown(self) -> None:
        for manager in (self._cb_manager, self._one_by_one):
            if manager is not None:
                manager.stop()
        self._cb_manager = self._one_by_one = None
