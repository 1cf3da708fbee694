"""What both of the server's managers do: a limit of context, and answers in one piece from the queue of a stream."""

import logging

from transformers import GenerationConfig
from transformers.cli.serving.utils import _StreamError, build_response_parser

from .metrics import Metrics
from .requests import Failed, Refused, Request, current
from .stopping import cut
from .streamers import BatchedStreamer, TurnsStreamer

logger = logging.getLogger("uvicorn.error")


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
