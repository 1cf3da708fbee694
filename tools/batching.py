"""Measures continuous batching: tokens per second of several requests together, and of the same one after the other.

    python tools/batching.py --requests 8
    python tools/batching.py --requests 8 --profile

The model has `--layers` layers of a large one, random weights in 4 bits, and is patched. Both ways take turns in every
round, on the same prompts: `generate`, and the server's continuous batching. Printed are the medians over the rounds,
and the median of the rounds' ratios. `--profile` also prints the time of each op in one round of continuous batching.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_moe_metal
from torch_moe_metal.bench.here import add_device, positive
from torch_moe_metal.bench.measure import machine
from torch_moe_metal.bench.whole_model import DEFAULT, WHOLE, pack_model, random_model

Answers = list[list[int]]


class Sequential:
    def __init__(self, model, tokens: int):
        self.model, self.tokens = model, tokens

    def __call__(self, prompts: Answers) -> Answers:
        return [self.answer(torch.tensor([prompt], device=self.model.device)) for prompt in prompts]

    def answer(self, ids: torch.Tensor) -> list[int]:
        limits = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens, "do_sample": False}
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
        return output[0, ids.shape[1] :].tolist()


class Batched:
    """The server's way. While its manager runs, the model's attention is that of paged caches, and `generate` fails."""

    def __init__(self, model, tokens: int):
        from torch_moe_metal.serve.generation import batching, start_batching
        from torch_moe_metal.serve.sampling import GREEDY

        self.manager, self.tokens, self.greedy = start_batching(model, batching(8192)), tokens, GREEDY

    def __call__(self, prompts: Answers) -> Answers:
        limits = {"max_new_tokens": self.tokens, **self.greedy}
        names = [self.manager.add_request(prompt, eos_token_id=-1, **limits) for prompt in prompts]
        found = {}
        while len(found) < len(names):
            result = self.manager.get_result(timeout=600)
            assert result is not None and result.error is None, result
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]


@dataclass
class Speed:
    wall: float  # tokens per second
    cpu: float  # tokens per second of processor time, which other processes of a busy machine do not change

    def __str__(self) -> str:
        return f"{self.wall:.1f} tokens/s ({self.cpu:.1f} per CPU second)"


def timed(run, prompts: Answers) -> tuple[Speed, Answers]:
    wall, cpu = time.perf_counter(), time.process_time()
    answers = run(prompts)
    tokens = sum(map(len, answers))
    return Speed(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)), answers


def measure(model, prompts: Answers, tokens: int, rounds: int) -> list[tuple[Speed, Speed]]:
    """The speed of both ways, in each round after the first."""
    found = []
    for _ in range(rounds + 1):
        before, expected = timed(Sequential(model, tokens), prompts)
        batched = Batched(model, tokens)
        after, answers = timed(batched, prompts)
        batched.manager.stop(hard_stop=True)
        same = sum(map(list.__eq__, answers, expected))
        print(f"one after the other {before}, together {after}; {same} of {len(prompts)} answers agree", flush=True)
        found.append((before, after))
    return found[1:]


def summary(found: list[tuple[Speed, Speed]]) -> str:
    def medians(kind: str) -> str:
        pairs = [(getattr(before, kind), getattr(after, kind)) for before, after in found]
        print(summary(found), flush=True)

    if options.profile:
        profile(model, prompts, options.tokens)


if __name__ == "__main__":
    main()
