"""How the server generates: transformers' managers, with stop strings, seeds, a limit of context, and cancellation.

transformers has two managers: one runs `generate` for one request after the other, the other runs all requests together
on a paged cache. In our form of the first one several requests take turns. Both put texts into a queue. Ours end the
text before a stop string, and take an answer that is not streamed from the same queue, so that it can be cancelled too.
"""

import asyncio
import functools
import math

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerationState

from ..common.cli import CannotRun
from ..common.prefix_folder import PrefixFolder
from ..common.prefixes import PIECE, Prefixes
from .in_turns import InTurns
from .manager import Answers
from .metrics import Metrics
from .recovery import survive
from .requests import STOPPED, Request, current
from .sampling import GREEDY, SHARED, install, sampling
from .streamers import BatchedStreamer, StoppingQueue

PAGE = 256  # tokens of a page of the paged cache, transformers' default


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

    def stop_batching(self, context: int) -> None:
        """Let the answers take turns, since the model cannot be batched. Each has this context."""
        self._continuous_batching, self._cb_manager, self.context = False, None, context

    def fail_all(self) -> None:
        """End every request with an error."""
        for request in list(self.requests):
            request.fail(STOPPED)

    def shutdown(self) -> None:
        for manager in (self._cb_manager, self._in_turns):
            if manager is not None:
                manager.stop()
        self._cb_manager = self._in_turns = None
