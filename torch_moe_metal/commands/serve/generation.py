"""How the server generates: transformers' managers, with stop strings, seeds, a limit of context, and cancellation.

transformers has two managers: one runs `generate` for one request after the other, the other runs all requests together
on a paged cache. In our form of the first one several requests take turns. Both put texts into a queue. Ours end the
text before a stop string, and take an answer that is not streamed from the same queue, so that it can be cancelled too.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    _StreamError,
    build_response_parser,
)
from transformers.generation.continuous_batching.utils import drain_queue

from ...transformers.versions import with_cache
from ..common.cli import UNSAMPLED, CannotRun, Waits
from ..common.prefixes import Prefixes
from .parsing import LenientParser
from .recovery import survive
from .sampling import GREEDY, SHARED, Penalising, Penalties, install, sampling
from .stopping import StopFilter, cut
from .turns import Turns, with_turns

logger = logging.getLogger("uvicorn.error")
PAGE = 256  # tokens of a page of the paged cache, transformers' default
PIECE = 1024  # tokens of a prompt that are computed at once, also in a step of continuous batching
TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # the inputs of a prompt without images
STOPPED = "the server is shutting down"


class Refused(HTTPException):
    """A request that is wrong, with OpenAI's code and the name of the wrong field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(status, message)
        self.code, self.param = code, param


class Failed(RuntimeError):
    """Generation raised an error."""


@dataclass(eq=False)
class Request:
    """The fields of a request that `GenerationConfig` has no place for, and how to end its generation."""

    stops: list[str] = field(default_factory=list)
    one_call: bool = False
    seed: int | None = None
    penalties: Penalties = field(default_factory=Penalties)
    chat: bool = False
    required: str = "prompt"  # the field with the prompt
    cuts: list[int] = field(default_factory=list)  # of the prompt, see Prefixes
    reused: int = 0  # tokens of the prompt that were not computed again
    cancel: Callable[[], None] = lambda: None
    fail: Callable[[str], None] = lambda _reason: None

    def started(self, streamer: "DirectStreamer | CBStreamer", put: Callable[[object], None]) -> None:
        self.cancel = streamer.cancel
        self.fail = lambda reason: (put(_StreamError(reason)), streamer.cancel())


#: The request of the current task. The application's wrapper sets it for each one.
current: ContextVar[Request] = ContextVar("current")


class TurnsStreamer(DirectStreamer):
    """`generate` calls `put` with each token, on its own thread."""

    def __init__(self, *args, request: Request, **kwargs):
        self.filter, self.ids = StopFilter(request.stops, request.one_call), []
        self.times = [time.perf_counter()]  # of the request and of its tokens
        super().__init__(*args, **kwargs)

    def put(self, value: torch.Tensor) -> None:
        if not self._first:  # which is the prompt
            self.ids += value.tolist()
            self.times.append(time.perf_counter())
        super().put(value)

    def __str__(self) -> str:
        if not self.ids:
            return "no token"
        start, first, *_, last = [*self.times, self.times[-1]]
        speed = f", {(len(self.ids) - 1) / (last - first):.1f} tokens/s" if last > first else ""
        return f"the first token after {first - start:.2f} s; {len(self.ids)} tokens{speed}"

    def check(self) -> None:
        """End `generate` if the request was cancelled."""
        if self._cancelled.is_set():
            raise _GenerationCancelled

    def _enqueue(self, item: object) -> None:
        for each in self.filter.feed(item):
            super()._enqueue(each)
        if self.filter.found:
            raise _GenerationCancelled


class StoppingQueue(asyncio.Queue):
    """The queue of a `BatchedStreamer`, which writes to it on the event loop's thread."""

    def __init__(self, request: Request):
        super().__init__()
        self.filter = StopFilter(request.stops, request.one_call)

    def put_nowait(self, item: object) -> None:
        for each in self.filter.feed(item):
            super().put_nowait(each)
        if self.filter.found:
            raise _GenerationCancelled


class BatchedStreamer(CBStreamer):
    """Continuous batching calls `take` with all tokens so far."""

    ids: tuple[int, ...] | list[int] = ()
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
        except Exception as error:  # of the parser; transformers would skip the step's other requests
            self._queue.put_nowait(_StreamError(str(error)))
            self.cancel()

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            super().cancel()
        # transformers keeps the handler of a cancelled request. Without it, the output of a step that was running goes
        # to the shared queue, which has no other reader.
        router = self._cb.output_router
        with router._lock:
            router.result_handlers.pop(self._request_id, None)
        drain_queue(router.output_queue)


class Answers:
    """Both managers: the limit of context, and answers in one piece, which are collected from a stream."""

    context: int

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        request, parser = current.get(), None
        if request.chat and (request.stops or request.one_call):  # stop strings do not apply to reasoning
            parser = build_response_parser(processor, model, inputs["input_ids"])
        queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id, parser)
        while (item := await queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise Failed(item.msg)
        ids = list(streamer.ids[: streamer.total_tokens])
        text = processor.decode(ids, skip_special_tokens=True)
        return cut(text, request.stops), length_of(inputs), ids

    def limit(self, inputs: dict, gen_config: GenerationConfig) -> None:
        """Refuse a prompt that does not fit the context, and end the answer where the context ends."""
        length = length_of(inputs)
        if length == 0:
            raise Refused(400, "the prompt has no tokens", param=current.get().required)
        if length >= self.context:
            message = f"expected a prompt of fewer than {self.context} tokens, the context, got {length}"
            raise Refused(400, message, "context_length_exceeded", current.get().required)
        gen_config.max_length, room = None, self.context - length
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)


def length_of(inputs: dict) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else ids.shape[-1]


def lenient(parser) -> LenientParser | None:
    return parser and LenientParser(parser)


def rust_tokenizer(processor):
    return getattr(processor, "tokenizer", processor)._tokenizer


class InTurns(Answers, GenerateManager):
    """Up to `parallel` requests at once, each with a `generate` and a cache of its own. They take turns."""

    def __init__(self, context: int, parallel: int, model: torch.nn.Module, prefix_memory: float | None):
        self.model, self.context, self.turns = model, context, Turns(model.device)
        self.prefixes = Prefixes(model, prefix_memory)
        self.threads = ThreadPoolExecutor(parallel, "generate")
        self.piece = PIECE if self.prefixes.continues else None

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self.limit(inputs, gen_config)
        request, loop, queue = current.get(), asyncio.get_running_loop(), asyncio.Queue()
        streamer = TurnsStreamer(rust_tokenizer(processor), loop, queue, lenient(response_parser), request=request)
        arguments = {"streamer": streamer, "generation_config": gen_config, "tokenizer": processor}
        penalties = [Penalising(request.penalties)] if request.penalties else []
        arguments["logits_processor"] = LogitsProcessorList([*penalties, Waits()])
        if hasattr(model, "has_talker"):  # it would speak as well
            arguments["generation_mode"] = "text"
        gen_config.prefill_chunk_size = self.piece if self.comes_in_pieces(inputs, gen_config) else None
        ids = inputs["input_ids"][0].tolist()
        reuses = self.reuses(inputs, gen_config)
        of_beginnings = {name: value for name, value in arguments.items() if name == "generation_mode"} | UNSAMPLED
        of_beginnings |= {"max_new_tokens": 1, "prefill_chunk_size": gen_config.prefill_chunk_size}

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        prefix = None

        def before_forward() -> None:
            if prefix is not None:
                self.prefixes.note_step(prefix, ids)
            if not streamer.ids:  # on mps `generate` waits for tokens, and would queue all pieces of a prompt
                self.turns.finish()
            self.turns.give_way()
            streamer.check()

        def generate() -> None:
            nonlocal prefix
            own = with_turns(self.model, before_forward)
            tensors = inputs.to(own.device)
            if not reuses:
                own.generate(**tensors, **arguments)
                return
            prefix = self.prefixes.take(ids)
            request.reused, cached = len(prefix.ids), with_cache(prefix.cache)
            try:
                for beginning in self.prefixes.before(prefix, ids, request.cuts):
                    first = {name: value[:, : len(beginning)] for name, value in tensors.items()}
                    own.generate(**first, **cached, **of_beginnings)
                    prefix.note(beginning)
                own.generate(**tensors, **cached, **arguments)
            except _GenerationCancelled:  # between two forwards, so the cache is whole
                self.prefixes.give(prefix, ids + streamer.ids)
                raise
            self.prefixes.give(prefix, ids + streamer.ids)

        def run() -> None:
            try:
                streamer.check()
                with self.turns:
                    # here, since earlier requests draw random numbers from the same generator, maybe from their seeds
                    torch.seed() if request.seed is None else torch.manual_seed(request.seed)
                    generate()
            except _GenerationCancelled:
                put(None)
            except Exception as error:
                put(_StreamError(str(error)))
            logger.info("%s: %d tokens, %d of them reused; %s", request_id, len(ids), request.reused, streamer)

        request.started(streamer, put)
        self.threads.submit(run)
        return queue, streamer

    def reuses(self, inputs: dict, gen_config: GenerationConfig | None = None) -> bool:
        """Whether a prompt may begin with what was computed for another one. Images are not in its tokens."""
        uses_cache = gen_config is None or gen_config.use_cache is not False
        return self.prefixes.works and inputs.keys() <= TEXT and uses_cache

    def needs_cuts(self, inputs: dict) -> bool:
        return self.prefixes.needs_cuts and self.reuses(inputs)

    def comes_in_pieces(self, inputs: dict, gen_config: GenerationConfig) -> bool:
        """transformers does not split images, and needs a cache."""
        return length_of(inputs) > PIECE and inputs.keys() <= TEXT and gen_config.use_cache is not False

    def stop(self) -> None:
        """Wait for the threads, since the interpreter must not exit in the middle of an op."""
        self.threads.shutdown(cancel_futures=True)


class Batched(Answers, CBGenerateManager):
    """Continuous batching: each step computes a token of every request."""

    def __init__(self, context: int, cb_config: ContinuousBatchingConfig):
        super().__init__(cb_config)
        self.context = context

    def init_cb(self, model, gen_config=None) -> None:
        if self._cb is None:
            self._cb = start_batching(model, self._cb_config)

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self._check_alive(request_id)
        self.limit(inputs, gen_config)
        request, loop, queue = current.get(), asyncio.get_running_loop(), StoppingQueue(current.get())
        streamer = BatchedStreamer(
            self._cb, request_id, rust_tokenizer(processor), loop, queue, lenient(response_parser)
        )
        self._cb.register_result_handler(request_id, streamer.take)
        request.started(streamer, lambda item: loop.call_soon_threadsafe(queue.put_nowait, item))
        accepted = self._cb.add_request(
            inputs["input_ids"],
            request_id=request_id,
            streaming=True,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            **sampling(gen_config, model.config.get_text_config().vocab_size, request.seed, request.penalties),
        )
        if accepted is None:
            raise CBWorkerDeadError(STOPPED)
        return queue, streamer

    def stop(self) -> None:
        if self._cb is not None:
            self._cb.stop(block=True, timeout=30, hard_stop=True)


def batching(context: int) -> ContinuousBatchingConfig:
    """A paged cache of this many tokens, which all requests share."""
    pages = math.ceil(context / PAGE) + 1
    step = min(PIECE, pages * PAGE)
    return ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=step, per_request_processors=True
    )


def start_batching(model, config: ContinuousBatchingConfig):
    """transformers' manager of continuous batching, after its first tokens: some models fail only then."""
    try:
        manager = model.init_continuous_batching(GenerationConfig(**SHARED), config)
    except ValueError as error:  # the cache has no pages for some kinds of layers
        raise CannotRun(f"--continuous-batching: {error}") from error
    install(manager)
    survive(manager)
    manager.start()
    manager.add_request([0, 0], max_new_tokens=2, **GREEDY)
    result, status = None, manager.background_thread_status
    while result is None and status.fatal_error is None:
        result = manager.get_result(timeout=1)
    if (error := status.fatal_error or result.error) is not None:
        manager.stop()
        raise CannotRun(f"--continuous-batching: transformers' paged cache does not run this model: {error}")
    return manager


class Generation(GenerationState):
    """transformers' state, for one model, with the requests that are running."""

    def __init__(
        self,
        model: torch.nn.Module,
        context: int,
        continuous_batching: bool,
        parallel: int,
        prefix_memory: float | None = None,
    ):
        super().__init__(continuous_batching=continuous_batching, cb_config=batching(context))
        self.model, self.context, self.parallel, self.prefix_memory = model, context, parallel, prefix_memory
        self.requests: set[Request] = set()
        self._in_turns: InTurns | None = None

    def get_manager(self, model_id: str, use_cb: bool = False) -> InTurns | Batched:
        if use_cb:
            self._cb_manager = self._cb_manager or Batched(self.context, self._cb_config)
            return self._cb_manager
        self._in_turns = self._in_turns or InTurns(self.context, self.parallel, self.model, self.prefix_memory)
        return self._in_turns

    def fail_all(self) -> None:
        """End every request with an error."""
        for request in list(self.requests):
            request.fail(STOPPED)

    def shutdown(self) -> None:
        for manager in (self._cb_manager, self._in_turns):
            if manager is not None:
                manager.stop()
        self._cb_manager = self._in_turns = None
