"""How the server generates: transformers' managers, with stop strings, seeds, a limit of context, and cancellation.

transformers has two managers: one runs `generate` for one request after the other, the other runs all requests together
on a paged cache. In our form of the first one several requests take turns. Both put texts into a queue. Ours end the
text before a stop string, and take an answer that is not streamed from the same queue, so that it can be cancelled too.
"""

import asyncio
import contextlib
import functools
import logging
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBWorkerDeadError,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    _StreamError,
    build_response_parser,
)

from ...transformers.versions import with_cache
from ..common.cli import UNSAMPLED, CannotRun, Waits
from ..common.prefix_folder import PrefixFolder
from ..common.prefixes import Prefixes
from .metrics import Metrics
from .recovery import survive
from .requests import STOPPED, Failed, Refused, Request, current
from .sampling import GREEDY, SHARED, Changing, install, sampling
from .stopping import cut
from .streamers import BatchedStreamer, StoppingQueue, TurnsStreamer
from .turns import Turns, with_turns

logger = logging.getLogger("uvicorn.error")
PAGE = 256  # tokens of a page of the paged cache, transformers' default
PIECE = 1024  # tokens of a prompt that are computed at once, also in a step of continuous batching
TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # the inputs of a prompt without images


class Answers:
    """Both managers: the limit of context, and answers in one piece, which are collected from a stream."""

    context: int
    metrics: Metrics

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        request, parser = current.get(), None
        if request.chat and (request.stops or request.one_call or request.recorder):  # which do not apply to reasoning
            parser = build_response_parser(processor, model, inputs["input_ids"])
        queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id, parser)
        while (item := await queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise Failed(item.msg)
            request.entries += getattr(item, "entries", [])
        ids = list(streamer.ids[: streamer.total_tokens])
        text = processor.decode(ids, skip_special_tokens=True)
        return cut(text, request.stops), length_of(inputs), ids

    def limit(self, inputs: dict, gen_config: GenerationConfig) -> None:
        """Refuse a prompt that does not fit the context, and end the answer where the context ends."""
        length = current.get().prompt = length_of(inputs)
        if length == 0:
            raise Refused(400, "the prompt has no tokens", param=current.get().required)
        if length >= self.context:
            message = f"expected a prompt of fewer than {self.context} tokens, the context, got {length}"
            raise Refused(400, message, "context_length_exceeded", current.get().required)
        gen_config.max_length, room = None, self.context - length
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)

    def report(self, request_id: str, request: Request, streamer: TurnsStreamer | BatchedStreamer) -> None:
        """Log and count a generation that has ended."""
        times = streamer.times
        logger.info("%s: %d tokens, %d of them reused; %s", request_id, request.prompt, request.reused, times)
        self.metrics.generated(request.prompt, request.reused, times)


def length_of(inputs: dict) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else ids.shape[-1]


class InTurns(Answers, GenerateManager):
    """Up to `parallel` requests at once, each with a `generate` and a cache of its own. They take turns."""

    def __init__(self, context: int, metrics: Metrics, parallel: int, model: torch.nn.Module, prefixes: Prefixes):
        self.context, self.metrics, self.model, self.turns = context, metrics, model, Turns(model.device)
        self.running: set[TurnsStreamer] = set()
        self.prefixes = prefixes
        if prefixes.folder is not None:
            prefixes.folder.turns = self.turns
        self.threads = ThreadPoolExecutor(parallel, "generate")
        self.piece = PIECE if self.prefixes.continues else None

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self.limit(inputs, gen_config)
        request, loop, queue = current.get(), asyncio.get_running_loop(), asyncio.Queue()
        streamer = TurnsStreamer(processor, loop, queue, response_parser, request)
        arguments = {"streamer": streamer, "generation_config": gen_config, "tokenizer": processor}
        changing = [Changing(request.changes)] if request.changes else []
        arguments["logits_processor"] = LogitsProcessorList([*changing, Waits()])
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
            self.running.add(streamer)
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
            self.running.discard(streamer)
            self.report(request_id, request, streamer)
            self.prefixes.settle()

        request.started(streamer, put)
        self.threads.submit(run)
        return queue, streamer

    def gauges(self) -> dict[str, float]:
        with self.prefixes.lock:
            kept = self.prefixes.nbytes()
        return {
            "requests_running": len(self.running),
            "requests_waiting": self.threads._work_queue.qsize(),
            "prefix_memory_bytes": kept,
        }

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
        self.prefixes.close()


class Batched(Answers, CBGenerateManager):
    """Continuous batching: each step computes a token of every request."""

    def __init__(self, context: int, metrics: Metrics, cb_config: ContinuousBatchingConfig):
        super().__init__(cb_config)
        self.context, self.metrics = context, metrics

    def init_cb(self, model, gen_config=None) -> None:
        if self._cb is None:
            self._cb = start_batching(model, self._cb_config)

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        self._check_alive(request_id)
        self.limit(inputs, gen_config)
        request, loop, queue = current.get(), asyncio.get_running_loop(), StoppingQueue(current.get())
        report = functools.partial(self.report, request_id, request)
        streamer = BatchedStreamer(self._cb, request_id, processor, loop, queue, response_parser, report)
        self._cb.register_result_handler(request_id, streamer.take)
        request.started(streamer, lambda item: loop.call_soon_threadsafe(queue.put_nowait, item))
        accepted = self._cb.add_request(
            inputs["input_ids"],
            request_id=request_id,
            streaming=True,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            **sampling(gen_config, model.config.get_text_config().vocab_size, request.seed, request.changes),
        )
        if accepted is None:
            raise CBWorkerDeadError(STOPPED)
        return queue, streamer

    def gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        return {
            "requests_running": len(scheduler.active_requests),
            "requests_waiting": len(scheduler.waiting_requests),
        }

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
        prefix_folder: PrefixFolder | None = None,
    ):
        super().__init__(continuous_batching=continuous_batching, cb_config=batching(context))
        self.model, self.context, self.parallel = model, context, parallel
        self.prefix_memory, self.prefix_folder = prefix_memory, prefix_folder
        self.requests: set[Request] = set()
        self.metrics = Metrics()
        self._in_turns: InTurns | None = None

    def get_manager(self, model_id: str, use_cb: bool = False) -> InTurns | Batched:
        if use_cb:
            self._cb_manager = self._cb_manager or Batched(self.context, self.metrics, self._cb_config)
            return self._cb_manager
        if self._in_turns is None:
            prefixes = Prefixes(self.model, self.prefix_memory, self.prefix_folder)
            self._in_turns = InTurns(self.context, self.metrics, self.parallel, self.model, prefixes)
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
