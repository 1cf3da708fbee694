"""How each request of a batch draws its tokens.

transformers' processors of continuous batching sort the whole vocabulary twice in every step, also for greedy requests.
Ours give the same scores and sort only where a request needs it.
"""

import sys

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

#: The manager's own configuration. It makes a processor of each kind, since none of these values is neutral.
SHARED = {"do_sample": True, "temperature": 0.5, "top_k": 1, "top_p": 0.5, "eos_token_id": -1}
#: The arguments of a greedy request: draw from the single likeliest token.
GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}


def sampling(config: GenerationConfig, vocabulary: int) -> dict[str, float | int]:
    """A request's arguments for these processors."""
    if not config.do_sample:
        return GREEDY
    top_k = min(config.top_k or vocabulary, vocabulary)
    return {"temperature": config.temperature or 1.0, "top_k": top_k, "top_p": config.top_p or 1.0}


def quick(processor):
    """The quick form of transformers' processor, if it has one."""
    if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
        return QuickTopK(processor)
    if isinstance(processor, ContinuousBatchingTopPLogitsWarper):
        return QuickTopP(processor)
    return processor


class QuickTopK(ContinuousBatchingTopKLogitsWarper):
    least, most = 0, sys.maxsize  # of the batch

    def prepare_tensor_args(self, requests) -> torch.Tensor:
        top_k = super().prepare_tensor_args(requests)
        if len(top_k):
            self.least, self.most = int(top_k.min()), int(top_k.max())
        return top_k

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        vocabulary = scores.shape[-1]
        if self.least >= vocabulary:
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
