"""Measures continuous batching: tokens per second of several requests together, and one after the other.

    python tools/batching.py --requests 8

The model has `--layers` layers of a large one with random weights in 4 bits, and is patched. Both methods take turns in
every round, with the same prompts: `generate`, and the server's continuous batching. It prints the medians over the
rounds, and the median of the ratios, by wall-clock time and by CPU time, which other processes affect less.

Then it prints a limit of that ratio: the time in which a step's weights are read once, at the speed with which this
machine reads memory. A step of one sequence reads the experts of one token. A step of the batch reads the experts that
any of its tokens selects, and everything else once. `tools/batching_steps.py` prints where the time of a step goes.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_moe_metal
from torch_moe_metal.bench.measure import Limits, machine
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


# ------------------------------------------------------------------------------------------------ the limit


class Chosen(TorchDispatchMode):
    """Counts the experts that each call of `experts` selects, by the number of its tokens. Its hooks work on whichever
    thread runs the model."""

    def __init__(self, model):
        super().__init__()
        self.counts: dict[int, list[int]] = defaultdict(list)
        self.hooks = (
            model.register_forward_pre_hook(lambda *_: self.__enter__() and None),
            model.register_forward_hook(lambda *_: self.__exit__(None, None, None)),
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.moe_metal.experts.default:
            ids = args[2]
            self.counts[ids.shape[:-1].numel()].append(ids.unique().numel())
        return function(*args, **(kwargs or {}))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def chosen_experts(model, prompts: Tokens) -> dict[int, float]:
    """The mean number of different experts in a layer, for a step of one sequence and for one of the batch."""
    counts = Chosen(model)
    for make in WAYS.values():
        way = make(model, 8)
        way(prompts)
        way.stop()
    counts.remove()
    return {tokens: statistics.mean(counts.counts[tokens]) for tokens in (1, len(prompts))}


def bytes_of(model, chosen: float) -> float:
    """Bytes of the weights that a step reads if it selects so many experts in each layer. Of the embedding it reads
    only a few rows."""
    weights = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        del weights[id(model.get_input_embeddings().weight)]
    modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
    of_experts = [tensor for module in modules for tensor in module.state_dict(keep_vars=True).values()]
    everything, experts = (sum(tensor.nbytes for tensor in part) for part in (weights.values(), of_experts))
    return everything - experts + experts * chosen / of_experts[0].shape[0]


def limit(model, prompts: Tokens, seconds: float = 0.3) -> str:
    read = Limits(str(model.device), seconds).gb_per_s["read"]
    lines, times = [f"weights read once in each step, at {read:.1f} GB/s:"], []
    for tokens, chosen in chosen_experts(model, prompts).items():
        size = bytes_of(model, chosen)
        times.append(size / read / 1e9)
        name = "one sequence" if tokens == 1 else f"{tokens} requests"
        lines.append(f"  {name:14}{chosen:6.1f} experts{size / 1e6:9.1f} MB{times[-1] * 1e3:9.3f} ms")
    return "\n".join(
        [*lines, f"  a ratio of at most {len(prompts) * times[0] / times[1]:.2f}, if only reading took time"]
    )


# ------------------------------------------------------------------------------------------------ the command


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--model", choices=WHOLE, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--layers", type=positive, default=4, help="default: 4")
    parser.add_argument("--format", default="affine4", help="of bench-model's --formats (default: affine4)")
    parser.add_argument("--requests", type=positive, default=8, help="default: 8")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--tokens", type=positive, default=64, help="of each answer (default: 64)")
    return parser


def make(options: argparse.Namespace) -> tuple[nn.Module, Tokens]:
    """The model and the prompts."""
    print(machine(), f"threads {torch.get_num_threads()}", flush=True)
    model = random_model(options.model, options.layers, options.device)
    pack_model(model, options.format, [])
    torch_moe_metal.patch(model)
    shape = options.requests, options.prompt
    return model, torch.randint(0, model.config.vocab_size, shape).tolist()  # random_model has set the seed


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="after one that warms up (default: 5)")
    options = parser.parse_args(argv)
    model, prompts = make(options)
    found = measure(model, prompts, options.tokens, options.rounds)
    print(f"tokens/s: {summary(found, 'wall')}\ntokens per CPU second: {summary(found, 'cpu')}", flush=True)
    print(limit(model, prompts), flush=True)


if __name__ == "__main__":
    main()
