"""How each request draws its tokens.

`Penalties` are the changes of scores that OpenAI's API and other servers define. They are the same with and without
continuous batching, where transformers applies its own to all requests of a step or to none. transformers' processors
of continuous batching sort the whole vocabulary twice in every step, also for greedy requests. Ours give the same
scores and sort only where a request needs it. transformers draws the tokens of all requests with one generator, also
those of greedy ones; `Seeded` draws those of a request with a seed. All draws are `draw`'s.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner

#: The manager's own configuration. It makes a processor of each kind, since none of these values is neutral.
SHARED = {"do_sample": True, "temperature": 0.5, "top_k": 1, "top_p": 0.5, "eos_token_id": -1}
#: The arguments of a greedy request: draw from the single likeliest token.
GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}


class Change(Protocol):
    """Changes the scores of a request's next token, or notes them."""

    def change(self, scores: torch.Tensor, tokens: Sequence[int] | torch.Tensor, start: int) -> None:
        """Change the scores, which are a row, after these tokens. The answer starts at `start`."""


@dataclass(frozen=True)
class Penalties:
    """What a request adds to the scores of tokens, by what is in its prompt and its answer."""

    bias: dict[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __bool__(self) -> bool:
        return self != Penalties()

    def change(self, scores: torch.Tensor, tokens: Sequence[int] | torch.Tensor, start: int) -> None:
        tokens = torch.as_tensor(tokens, dtype=torch.long, device=scores.device)
        answer = tokens[start:]
        if self.bias:
            ids = torch.tensor(list(self.bias), device=scores.device)
            scores[ids] += torch.tensor(list(self.bias.values()), dtype=scores.dtype, device=scores.device)
        if self.repetition != 1:  # a token that comes twice is written twice, with the same score
            found = scores[tokens]
            scores[tokens] = torch.where(found < 0, found * self.repetition, found / self.repetition)
        if self.presence:
            scores[answer] = scores[answer] - self.presence
        if self.frequency:
            scores.index_add_(0, answer, scores.new_full(answer.shape, -self.frequency))


class Changing(LogitsProcessor):
    """`generate`'s processor for one request."""

    def __init__(self, changes: Sequence[Change]):
        self.changes, self.start = changes, None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            self.start = input_ids.shape[-1]
        for each in self.changes:
            each.change(scores[0], input_ids[0], self.start)
        return scores


def sampling(
    config: GenerationConfig, vocabulary: int, seed: int | None = None, changes: Sequence[Change] = ()
) -> dict[str, object]:
    """A request's arguments for these processors."""
    found: dict[str, object] = {"changes": tuple(changes)} if changes else {}
    if not config.do_sample:
        return GREEDY | found
    top_k = min(config.top_k or vocabulary, vocabulary)
    found |= {"temperature": config.temperature or 1.0, "top_k": top_k, "top_p": config.top_p or 1.0}
    found |= {"min_p": config.min_p} if config.min_p else {}
    return found if seed is None else found | {"seed": seed}


def install(manager: ContinuousBatchingManager) -> None:
    """Make a manager that has not started yet use our processors."""
    processors, create = manager.logit_processor, manager._create_batch_processor
    processors.logits_processor[:] = [
        BatchChanging(),
        *map(quick, processors.logits_processor),
        MinP(),
        Seeded(),
    ]
    processors.tensors_required = len(processors.logits_processor)
    processors._retrieve_processors_kwargs()
    top_k = next(each for each in processors.logits_processor if isinstance(each, QuickTopK))

    def create_batch_processor() -> ContinuousBatchProcessor:
        batch_processor = create()
        top_k.sample_for(batch_processor.model_runner)
        return batch_processor

    manager._create_batch_processor = create_batch_processor


def quick(processor):
    """The quick form of transformers' processor, if it has one."""
    if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
        return QuickTopK(processor)
    if isinstance(processor, ContinuousBatchingTopPLogitsWarper):
        return QuickTopP(processor)
    return processor


def draw(probabilities: torch.Tensor, waits: torch.Tensor | None = None) -> torch.Tensor:
    """A token for each row of probabilities [..., vocabulary], as `torch.multinomial` draws it, with the same numbers.
    `waits` are exponentially distributed random numbers.

    A token of probability zero is never drawn, and a token of probability one always is. On mps `exponential_` may give
    zeros, so that multinomial divides zero by zero and takes the NaN as the largest (pytorch#192577). Here they are the
    smallest wait that the CPU draws. A smaller one would make unlikely tokens win."""
    waits = torch.empty_like(probabilities).exponential_() if waits is None else waits
    return (probabilities / waits.clamp_min(torch.finfo(waits.dtype).eps / 2)).argmax(-1)


class QuickTopK(ContinuousBatchingTopKLogitsWarper):
    """In a step whose requests are all greedy it changes no scores, and `sample_for` takes the largest: a draw takes a
    random number for each token of the vocabulary."""

    least, most = 0, sys.maxsize  # of the step's requests

    def sample_for(self, runner: ModelRunner) -> None:
        """Make this runner draw by `draw`, and only in steps with a request that is not greedy."""

        def sample(scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            tokens = draw(scores[0].softmax(-1)) if self.most > 1 else scores[0].argmax(-1)
            output_ids[0, : scores.shape[1]].copy_(tokens)

        runner._sample = sample

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        top_k = super().prepare_tensor_args(requests)
        if len(top_k):
            self.least, self.most = int(top_k.min()), int(top_k.max())
        return top_k

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        vocabulary = scores.shape[-1]
        if self.least >= vocabulary or self.most == 1:
            return scores
        if self.most > vocabulary // 8:
            return super().__call__(scores, tensor_arg)
        last = (tensor_arg[: scores.shape[0]] - 1).clamp(0, self.most - 1).long()[:, None]
        return scores.masked_fill(scores < scores.topk(self.most).values.gather(-1, last), self.filter_value)


class QuickTopP(ContinuousBatchingTopPLogitsWarper):
    least = 0.0  # of the batch

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        top_p = super().prepare_tensor_args(requests)
        if len(top_p):
            self.least = float(top_p.view(torch.float32).min())
        return top_p

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return scores if self.least >= 1.0 else super().__call__(scores, tensor_arg)


class MinP(ContinuousBatchingLogitsProcessor):
    """Leaves tokens with at least this share of the largest probability."""

    supported_kwargs = MappingProxyType({"min_p": float})
    ignored_kwargs: tuple[str, ...] = ()
    most = 0.0  # of the step's requests

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        found = [request.state.logit_processor_kwargs.get("min_p", 0.0) for request in requests]
        self.most = max(found, default=0.0)
        return torch.tensor(found, dtype=torch.float32).view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self.most:
            return scores
        shares = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + shares.log(), -torch.inf)


class BatchChanging(ContinuousBatchingLogitsProcessor):
    """Applies the changes of each request."""

    supported_kwargs = MappingProxyType({"changes": tuple})
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.rows: dict[int, tuple] = {}  # of the batch, with the arguments of `Change.change`

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()  # unused: changes depend on the request's tokens

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        self.rows = {}
        for row, request in enumerate(requests):
            state = request.state
            if (changes := state.logit_processor_kwargs.get("changes")) is not None:
                # a request that is computed again has its answer so far in `initial_tokens`
                start = state._true_initial_tokens or len(state.initial_tokens)
                self.rows[row] = changes, state.initial_tokens + state.generated_tokens, start
        return torch.zeros(len(requests), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, (changes, tokens, start) in self.rows.items():
            for each in changes:
                each.change(scores[row], tokens, start)
        return scores


class Seeded(ContinuousBatchingLogitsProcessor):
    """Draws the tokens of requests with a seed: it leaves one score. The random numbers depend only on the seed and the
    token's place, so they are the same whichever requests run in the same step, and when a request is computed again
    because the cache was full."""

    supported_kwargs = MappingProxyType({"seed": int})
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.seeds: list[int | None] = []  # of each row of the batch

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()  # unused: a generator needs its seed on the host

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        self.seeds = [self._seed(request.state) for request in requests]
        return torch.zeros(len(requests), dtype=torch.int32)

    @staticmethod
    def _seed(state) -> int | None:
        if (seed := state.logit_processor_kwargs.get("seed")) is None:
            return None
        place = len(state.initial_tokens) + len(state.generated_tokens)
        return int.from_bytes(hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest())

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, seed in enumerate(self.seeds):
            if seed is not None:
                # as torch.multinomial draws, but on the CPU, which has the same numbers for every device
                waits = torch.empty(scores.shape[-1]).exponential_(generator=torch.Generator().manual_seed(seed))
                drawn = draw(scores[row].softmax(-1), waits.to(scores.device))
                others = torch.arange(scores.shape[-1], device=scores.device) != drawn
                scores[row].masked_fill_(others, -torch.inf)
        return scores
