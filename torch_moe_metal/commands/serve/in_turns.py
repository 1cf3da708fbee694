"""transformers' manager that runs `generate`, for several requests that take turns. A request that begins like an
earlier one continues from the store of prefixes."""

import asyncio
import contextlib
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cli.serving.utils import GenerateManager, _GenerationCancelled, _StreamError

from ...transformers.versions import with_cache
from ..common.cli import UNSAMPLED, Waits
from ..common.prefixes import PIECE, Prefix, Prefixes
from .images import TEXT, Images
from .manager import Answers, length_of, logger
from .metrics import Metrics
from .requests import Request, current
from .sampling import Changing
from .streamers import TurnsStreamer
from .turns import Turns, with_turns

BETWEEN = 5.0  # seconds between two lines about a long prompt


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
        running = Running(self, request, request_id, streamer, inputs, arguments)

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            self.running.add(streamer)
            try:
                running.run()
            except _GenerationCancelled:
                put(None)
            except Exception as error:
                put(_StreamError(str(error)))
            self.running.discard(streamer)
            self.report(request_id, request, streamer)
            self.prefixes.settle()
            give_back()

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
        """Whether a prompt may begin with what was computed for another one."""
        uses_cache = gen_config is None or gen_config.use_cache is not False
        return self.prefixes.works and uses_cache and Images(inputs).known

    def needs_cuts(self, inputs: dict) -> bool:
        return self.prefixes.needs_cuts and self.reuses(inputs)

    def comes_in_pieces(self, inputs: dict, gen_config: GenerationConfig) -> bool:
        """transformers does not split images, and needs a cache."""
        return length_of(inputs) > PIECE and inputs.keys() <= TEXT and gen_config.use_cache is not False

    def stop(self) -> None:
        """Wait for the threads, since the interpreter must not exit in the middle of an op."""
        self.threads.shutdown(cancel_futures=True)
        self.prefixes.close()


def give_back() -> None:
    """Return freed memory to the system. glibc keeps what a thread has freed for that thread: with four threads and
    caches of 30 MB, half a gigabyte."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class Running:
    """The generation of one answer, on a thread of its own."""

    def __init__(
        self,
        manager: InTurns,
        request: Request,
        request_id: str,
        streamer: TurnsStreamer,
        inputs: dict,
        arguments: dict,
    ):
        self.manager, self.request, self.request_id, self.streamer = manager, request, request_id, streamer
        self.inputs, self.arguments, self.config = inputs, arguments, arguments["generation_config"]
        self.images = Images(inputs)
        self.ids = self.images.key(inputs["input_ids"][0].tolist())
        self.prefix: Prefix | None = None
        self.pieces, self.logged = 0, time.monotonic()

    def run(self) -> None:
        self.streamer.check()
        with self.manager.turns:
            # here, since earlier requests draw random numbers from the same generator, maybe from their seeds
            seed = self.request.seed
            torch.seed() if seed is None else torch.manual_seed(seed)
            self.generate(with_turns(self.manager.model, self.before_forward))

    def generate(self, model: torch.nn.Module) -> None:
        tensors, prefixes = self.inputs.to(model.device), self.manager.prefixes
        if not self.manager.reuses(self.inputs, self.config):
            model.generate(**tensors, **self.arguments)
            return
        self.prefix = prefix = prefixes.take(self.ids, self.images.start)
        self.request.reused, cached = len(prefix.ids), with_cache(prefix.cache)
        of_beginnings = {name: value for name, value in self.arguments.items() if name == "generation_mode"} | UNSAMPLED
        of_beginnings |= {"max_new_tokens": 1, "prefill_chunk_size": self.config.prefill_chunk_size}
        try:
            for beginning in prefixes.before(prefix, self.ids, self.request.cuts):
                if (first := self.images.begin(tensors, len(prefix.ids), len(beginning))) is not None:
                    model.generate(**first, **cached, **of_beginnings)
                    prefix.note(beginning)
                    prefixes.forget_images()
            model.generate(**self.images.begin(tensors, len(prefix.ids), len(self.ids)), **cached, **self.arguments)
        except _GenerationCancelled:  # between two forwards, so the cache is whole
            prefixes.give(prefix, self.ids + self.streamer.ids)
            raise
        prefixes.give(prefix, self.ids + self.streamer.ids)

    def before_forward(self) -> None:
        manager = self.manager
        if self.prefix is not None:
            manager.prefixes.note_step(self.prefix, self.ids)
        if not self.streamer.ids:  # on mps `generate` waits for tokens, and would queue all pieces of a prompt
            manager.turns.finish()
            self.log()
        manager.turns.give_way()
        self.streamer.check()

    def log(self) -> None:
        """Say now and then how much of a long prompt is computed."""
        cache = None if self.prefix is None else self.prefix.cache
        done = self.pieces * PIECE if cache is None else cache.get_seq_length()
        self.pieces += 1
        if (now := time.monotonic()) > self.logged + BETWEEN:
            self.logged = now
            logger.info("%s: %d of the prompt's %d tokens are computed", self.request_id, done, len(self.ids))
