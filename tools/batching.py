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


def timed(run, prompts: Answers) -> tuple[float, Answers]:
    """Tokens per second, and the answers."""
    start = time.perf_counter()
    answers = run(prompts)
    return sum(map(len, answers)) / (time.perf_counter() - start), answers


def measure(model, prompts: Answers, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """Tokens per second of both ways, in each round after the first."""
    found = []
    for _ in range(rounds + 1):
        before, expected = timed(Sequential(model, tokens), prompts)
        batched = Batched(model, tokens)
        batched(prompts[:1])  # the first step allocates
        after, answers = timed(batched, prompts)
        batched.manager.stop(hard_stop=True)
        same = sum(map(list.__eq__, answers, expected))
        print(
            f"one after the other {before:6.1f}, together {after:6.1f} tokens/s: {after / before:.2f}x; "
            f"{same} of {len(prompts)} answers are the same",
            flush=True,
        )
        found.append((before, after))
    return found[1:]


def profile(model, prompts: Answers, tokens: int) -> None:
    batched = Batched(model, tokens)
    batched(prompts[:1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        batched(prompts)
    batched.manager.stop(hard_stop=True)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--model", choices=WHOLE, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--layers", type=positive, default=4, help="default: 4")
    parser.add_argument("--format", default="affine4", help="of bench-model's --formats (default: affine4)")
    parser.add_argument("--requests", type=positive, default=8, help="default: 8")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--tokens", type=positive, default=64, help="of each answer (default: 64)")
    parser.add_argument("--rounds", type=positive, default=5, help="after one that warms up (default: 5)")
    parser.add_argument("--profile", action="store_true", help="print the time of each op")
    options = parser.parse_args(arguments)
    print(machine(), f"threads {torch.get_num_threads()}", flush=True)
    model = random_model(options.model, options.layers, options.device)
    pack_model(model, options.format, [])
    torch_moe_metal.patch(model)
    generator = torch.Generator().manual_seed(0)
    shape = options.requests, options.prompt
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    found = measure(model, prompts, options.tokens, options.rounds)
    before, after = (statistics.median(column) for column in zip(*found, strict=True))
    ratio = statistics.median(after / before for before, after in found)
    print(f"medians: one after the other {before:.1f}, together {after:.1f} tokens/s: {ratio:.2f}x")
    if options.profile:
        profile(model, prompts, options.tokens)


if __name__ == "__main__":
    main()
