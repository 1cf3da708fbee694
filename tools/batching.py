"""Measures continuous batching: tokens per second of several requests together, and one after the other.

    python tools/batching.py --requests 8
    OMP_NUM_THREADS=1 python tools/batching.py --requests 8 --profile

The model has `--layers` layers of a large one with random weights in 4 bits, and is patched. Both methods take turns in
every round, with the same prompts: `generate`, and the server's continuous batching. It prints the medians over the
rounds, and the median of the ratios, by wall-clock time and by CPU time, which other processes affect less. `--profile`
also prints the time of each op for both methods.
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
from torch_moe_metal.bench.measure import machine
from torch_moe_metal.bench.whole_model import DEFAULT, WHOLE, pack_model, random_model
from torch_moe_metal.cli import add_device, positive

Tokens = list[list[int]]


class Sequential:
    def __init__(self, model, tokens: int):
        self.model, self.tokens = model, tokens

    def __call__(self, prompts: Tokens) -> Tokens:
        return [self.answer(torch.tensor([prompt], device=self.model.device)) for prompt in prompts]

    def answer(self, ids: torch.Tensor) -> list[int]:
        limits = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens, "do_sample": False}
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
        return output[0, ids.shape[1] :].tolist()

    def stop(self) -> None:
        pass


class Batched:
    """The server's method. While its manager runs, the model uses attention for paged caches, and `generate` fails."""

    def __init__(self, model, tokens: int):
        from torch_moe_metal.serve.generation import batching, start_batching
        from torch_moe_metal.serve.sampling import GREEDY

        self.manager, self.options = start_batching(model, batching(8192)), {"max_new_tokens": tokens, **GREEDY}

    def __call__(self, prompts: Tokens) -> Tokens:
        names = [self.manager.add_request(prompt, eos_token_id=-1, **self.options) for prompt in prompts]
        found = {}
        while len(found) < len(names):
            result = self.manager.get_result(timeout=600)
            assert result is not None and result.error is None, result
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    def stop(self) -> None:
        self.manager.stop(hard_stop=True)


WAYS = {"one after the other": Sequential, "together": Batched}


@dataclass
class Speed:
    wall: float  # tokens per second
    cpu: float  # tokens per second of CPU time, of all threads


def timed(way, prompts: Tokens) -> tuple[Speed, Tokens]:
    wall, cpu = time.perf_counter(), time.process_time()
    answers = way(prompts)
    tokens = sum(map(len, answers))
    return Speed(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)), answers


def measure(model, prompts: Tokens, tokens: int, rounds: int) -> list[list[Speed]]:
    """The speed of both methods in each round after the first."""
    found = []
    for _ in range(rounds + 1):
        speeds, answers = [], []
        for name, make in WAYS.items():
            way = make(model, tokens)
            speed, answer = timed(way, prompts)
            way.stop()
            print(f"{name}: {speed.wall:.2f} tokens/s, {speed.cpu:.2f} tokens per CPU second", flush=True)
            speeds.append(speed)
            answers.append(answer)
        same = sum(map(list.__eq__, *answers))
        print(f"{same} of {len(prompts)} answers are the same", flush=True)
        found.append(speeds)
    return found[1:]


def summary(found: list[list[Speed]], kind: str) -> str:
    rounds = [[getattr(speed, kind) for speed in speeds] for speeds in found]
    before, after = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(after / before for before, after in rounds)
    return f"{before:.2f} one after the other, {after:.2f} together: {ratio:.2f}x"


def profile(model, prompts: Tokens, tokens: int) -> None:
    for name, make in WAYS.items():
        way = make(model, tokens)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            way(prompts)
        way.stop()
        print(name, profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=16), sep="\n", flush=True)


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
    shape = options.requests, options.prompt
    prompts = torch.randint(0, model.config.vocab_size, shape).tolist()  # random_model has set the seed
    found = measure(model, prompts, options.tokens, options.rounds)
    print(f"tokens/s: {summary(found, 'wall')}\ntokens per CPU second: {summary(found, 'cpu')}", flush=True)
    if options.profile:
        profile(model, prompts, options.tokens)


if __name__ == "__main__":
    main()
