"""Shows when speculative decoding pays off: `python tools/speculation.py` prints the table of docs/running.md. It has
the speed by the length of a draft and by the share of correct tokens, relative to decoding without a draft.

The model has 4 layers of Qwen3-30B-A3B's sizes, random weights in 4 bits, and a head cut in the same proportion. Its
answer is fixed: each forward is computed normally, and a logits processor then selects the next token of the answer. A
draft proposes that answer, with each token correct with the given probability, and costs nothing: the figures are for
the forward that verifies it, with all overhead of `generate`. The time of a real draft model is additional. The last
column has the time of that forward relative to a forward of one token: each token selects its own experts, which have
to be read.

All settings take turns in every round; the medians over the rounds are printed. On a shared machine, OMP_NUM_THREADS=1
and `--clock cpu` measure only processor time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, LogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator

import torch_moe_metal
from torch_moe_metal.bench.measure import machine
from torch_moe_metal.bench.whole_model import pack_model, random_model
from torch_moe_metal.cli import positive
from torch_moe_metal.transformers.versions import with_cache

PROMPT = 64
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Given(LogitsProcessor):
    """Makes the next token that of the answer, whatever the logits are."""

    def __init__(self, answer: list[int]):
        self.answer = answer

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = ids.shape[1] - PROMPT
        if place < len(self.answer):
            scores[:, self.answer[place]] = torch.inf
        return scores


class Draft(CandidateGenerator):
    """The answer's next tokens, each correct with this probability."""

    def __init__(self, answer: list[int], tokens: int, right: float):
        self.answer, self.tokens, self.right = answer, tokens, right
        self.random, self.proposed, self.accepted = random.Random(0), 0, 0

    def get_candidates(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        place = ids.shape[1] - PROMPT
        true = self.answer[place : min(place + self.tokens, len(self.answer) - 1)]
        said = [token if self.random.random() < self.right else (token + 1) % 1000 for token in true]
        return torch.cat([ids, torch.tensor([said], dtype=ids.dtype)], 1), None

    def update_candidate_strategy(self, ids: torch.Tensor, scores: torch.Tensor, matches: int) -> None:
        self.proposed, self.accepted = self.proposed + 1, self.accepted + int(matches)


def answering(model, answer: list[int], draft: tuple[int, float] | None) -> Callable[[], object]:
    """A call that generates the answer."""
    prompt = torch.randint(0, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": len(answer), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"logits_processor": [Given(answer)], "attention_mask": torch.ones_like(prompt)}

    def generate() -> None:
        if draft is not None:
            model._get_candidate_generator = lambda **_: Draft(answer, *draft)
        more = {} if draft is None else {"prompt_lookup_num_tokens": draft[0]}
        output = model.generate(prompt, **how, **more)
        assert output[0, PROMPT:].tolist() == answer

    return generate


def forward_of(model, tokens: int, context: int) -> Callable[[], object]:
    """A call that computes so many tokens at a context length."""
    cache = DynamicCache(config=model.config)
    draw = torch.Generator().manual_seed(tokens)
    model(torch.randint(0, 1000, (1, context), generator=draw), **with_cache(cache), logits_to_keep=1)

    def forward() -> None:
        model(torch.randint(0, 1000, (1, tokens), generator=draw), **with_cache(cache))
        cache.crop(-tokens)

    return forward


def medians(clock: Callable[[], float], calls: dict, rounds: int, repeats: int = 1) -> dict:
    """Seconds of each call. The calls take turns."""
    seconds = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats):
                call()
            if number:  # the first round warms up
                seconds[name].append((clock() - start) / repeats)
    return {name: statistics.median(each) for name, each in seconds.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="affine4")
    parser.add_argument("--tokens", type=positive, default=48, help="of the answer (default: 48)")
    parser.add_argument("--drafts", type=positive, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--right", type=float, nargs="+", default=[0.6, 0.8])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    model = random_model(options.model, 4, "cpu")
    pack_model(model, options.format, [])
    torch_moe_metal.patch(model)
    answer = torch.randint(0, 1000, (options.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    settings = [None, *((tokens, right) for right in options.right for tokens in options.drafts)]
    found = medians(clock, {each: answering(model, answer, each) for each in settings}, options.rounds)
    lengths = [1, *(tokens + 1 for tokens in options.drafts)]
    spent = medians(clock, {length: forward_of(model, length, PROMPT) for length in lengths}, options.rounds, repeats=8)
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    print(f"threads: {torch.get_num_threads()}, clock: {options.clock}\n")
    print(f"{options.tokens / found[None]:.1f} tokens/s without a draft")
    print(f"a forward of one token: {spent[1] * 1000:.1f} ms\n")
    print(table(options, found, spent))


def table(options: argparse.Namespace, found: dict, spent: dict) -> str:
    """As in docs/running.md."""
    heads = ["tokens of a draft", *(f"speed, {right * 100:.0f} % correct" for right in options.right)]
    heads.append("verifying forward, relative to one token")
    rows = [heads, ["---"] * len(heads)]
    for tokens in options.drafts:
        speeds = [f"{found[None] / found[tokens, right]:.2f}" for right in options.right]
        rows.append([str(tokens), *speeds, f"{spent[tokens + 1] / spent[1]:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
