"""Measures continuous batching: tokens per second of several requests together, and of the same one after the other.

    python tools/batching.py --requests 8
    python tools/batching.py --requests 8 --profile

The model has 4 layers of a large one, random weights in 4 bits, and is patched. Both ways take turns in every round, on
the same prompts; printed are the medians, and the median of the rounds' ratios. `--profile` prints where the time of
batched generation goes, by op and by Python function.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_moe_metal
from torch_moe_metal.bench.here import add_device, positive
from torch_moe_metal.bench.measure import machine
from torch_moe_metal.bench.whole_model import WHOLE, pack_model, random_model


def one_after_the_other(model, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()

    return [answer(prompt) for prompt in prompts]


class Together:
    """transformers' continuous batching with the server's settings. The cache is allocated once."""

    def __init__(self, model, context: int, config: GenerationConfig):
        from torch_moe_metal.serve.generation import batching

        self.manager = model.init_continuous_batching(config, batching(context))
        self.tokens = config.max_new_tokens

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        names = self.manager.add_requests(prompts, max_new_tokens=self.tokens)
        found = {}
        while len(found) < len(names):
            result = self.manager.get_result(timeout=60)
            assert result is not None and result.error is None, result
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]
