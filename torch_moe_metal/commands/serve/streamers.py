"""Streamers: they take tokens from a generation, and put pieces of the answer into the request's queue."""

import asyncio
import time
from collections.abc import Iterator

import torch
from transformers.cli.serving.utils import (
    CBStreamer,
    DirectStreamer,
    ReasoningText,
    ToolCall,
    _GenerationCancelled,
    _StreamError,
)
from transformers.generation.continuous_batching.utils import drain_queue

from .logprobs import Scored, covering
from .parsing import LenientParser
from .requests import Request
from .stopping import StopFilter


class Pieces:
    """Passes on what a streamer has made of the tokens, until a stop string. Texts get the log probabilities of their
    tokens, if the request asks for them."""

    def __init__(self, request: Request):
        self.request, self.filter = request, StopFilter(request.stops, request.one_call)
        self.entries: list[dict] = []  # of tokens without a text so far
        self.passed = 0  # characters

    def note(self, place: int, token: int) -> None:
        if self.request.recorder is not None:
            self.entries.append(self.request.recorder.entry(place, token))

    def feed(self, item: object) -> Iterator[object]:
        constraint = self.request.constraint
        if item is None and constraint is not None and constraint.problem is not None:
            yield _StreamError(constraint.problem)
        items = self.filter.feed(item)
        self.request.stop = self.filter.stop
        for each in items:
            if isinstance(each, ReasoningText | ToolCall):
                self.entries = []
            elif isinstance(each, str) and self.entries:
                entries = covering(self.entries, len(each) + len(self.filter.held))
                each, self.entries = Scored(each, entries, self.passed), []
                self.passed += len(each)
            yield each
        if self.filter.found:
            raise _GenerationCancelled


class Times:
    """When the request came, and each of its tokens."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def note(self) -> None:
        self.times.append(time.perf_counter())

    @property
    def first(self) -> float | None:
        return self.times[1] - self.times[0] if len(self.times) > 1 else None

    @property
    def seconds(self) -> float:
        """From the first token to the last one."""
        return self.times[-1] - self.times[1]

    def __len__(self) -> int:
        return len(self.times) - 1

    def __str__(self) -> str:
        if self.first is None:
            return "no token"
        speed = f", {(len(self) - 1) / self.seconds:.1f} tokens/s" if self.seconds else ""
        return f"the first token after {self.first:.2f} s; {len(self)} tokens{speed}"


class TurnsStreamer(DirectStreamer):
    """`generate` calls `put` with each token, on its own thread."""

    def __init__(self, processor, loop, queue, parser, request: Request):
        self.pieces, self.ids, self.times = Pieces(request), [], Times()
        super().__init__(rust_tokenizer(processor), loop, queue, lenient(parser))

    def put(self, value: torch.Tensor) -> None:
        if not self._first:  # which is the prompt
            for token in value.tolist():
                self.pieces.note(len(self.ids), token)
                self.ids.append(token)
                self.times.note()
        super().put(value)

    def check(self) -> None:
        """End `generate` if the request was cancelled."""
        if self._cancelled.is_set():
            raise _GenerationCancelled

    def _enqueue(self, item: object) -> None:
        for each in self.pieces.feed(item):
            super()._enqueue(each)


class StoppingQueue(asyncio.Queue):
    """The queue of a `BatchedStreamer`, which writes to it on the event loop's thread."""

    def __init__(self, request: Request):
        super().__init__()
        self.pieces = Pieces(request)

    def put_nowait(self, item: object) -> None:
        for each in self.pieces.feed(item):
            super().put_nowait(each)


class BatchedStreamer(CBStreamer):
    """Continuous batching calls `take` with all tokens so far."""

    ids: tuple[int, ...] | list[int] = ()
    ended = False

    def __init__(self, manager, request_id: str, processor, loop, queue: StoppingQueue, parser, on_end):
        self.times, self.on_end = Times(), on_end
        super().__init__(manager, request_id, rust_tokenizer(processor), loop, queue, lenient(parser))

    def take(self, output) -> None:
        if self.ended:
            return
        for token in output.generated_tokens[len(self.ids) :]:
            self._queue.pieces.note(len(self.times), token)
            self.times.note()
        self.ids = output.generated_tokens
        try:
            self.put(output)
            if output.error is not None:
                self._queue.put_nowait(_StreamError(output.error))
            if output.error is not None or output.is_finished():
                self.finish()
                self.end()
        except _GenerationCancelled:
            self.cancel()
        except Exception as error:  # of the parser; transformers would skip the step's other requests
            self._queue.put_nowait(_StreamError(str(error)))
            self.cancel()

    def finish(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end(self)

    def cancel(self) -> None:
        if not self.ended:
            self.finish()
            super().cancel()
        # transformers keeps the handler of a cancelled request. Without it, the output of a step that was running goes
        # to the shared queue, which has no other reader.
        router = self._cb.output_router
        with router._lock:
            router.result_handlers.pop(self._request_id, None)
        drain_queue(router.output_queue)


def lenient(parser) -> LenientParser | None:
    return parser and LenientParser(parser)


def rust_tokenizer(processor):
    return getattr(processor, "tokenizer", processor)._tokenizer
