"""Time to the first token of the turns of a conversation, as `chat` and `serve` compute them with their store of
prefixes: `python tools/prefix_times.py`.

The models have random weights, two layers, and the families' usual kinds of layers. A conversation has 3,000 tokens;
each answer and question together have 60. "rewritten": the template writes each answer in another way, as those that
drop its reasoning. "restarted": before each turn, the store is a new one with the files of the last one. "four": the
mean of four conversations in turn.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "gemma4_text", "deepseek_v3")
#: Larger than those of the tiny models, so that a first turn takes seconds.
SIZES = {"hidden_size": 2048, "moe_intermediate_size": 2048, "max_position_embeddings": 8192}
WAYS = ("plain", "rewritten", "restarted", "four")
PROMPT, ANSWER, QUESTION, TURNS = 3000, 20, 40, 3


class FirstToken:
    """The streamer of `generate`, which gets the prompt and then each token."""

    def __init__(self):
        self.calls, self.start, self.seconds = 0, time.perf_counter(), 0.0

    def put(self, _ids: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        pass


class Conversation:
    """Random words, and the answers of a model."""

    def __init__(self, model, rewritten: bool = False):
        self.model, self.rewritten = model, rewritten
        self.ids = torch.randint(2, 80, (PROMPT,)).tolist()

    def generate(self, ids: list[int], cache, tokens: int, streamer: FirstToken | None) -> list[int]:
        from torch_moe_metal.commands.common.cli import UNSAMPLED
        from torch_moe_metal.transformers.versions import with_cache

        prompt = torch.tensor([ids])
        options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "min_new_tokens": tokens, **UNSAMPLED}
        output = self.model.generate(prompt, max_new_tokens=tokens, streamer=streamer, **options, **with_cache(cache))
        return output[0].tolist()

    @torch.no_grad()
    def turn(self, store) -> tuple[float, int, int]:
        """The seconds to the first token, the tokens that were reused, and those of the prompt."""
        ids = self.ids
        streamer, prefix = FirstToken(), store.take(ids)
        reused = len(prefix.ids)
        for beginning in store.before(prefix, ids, [64, len(ids) - QUESTION, len(ids) - 3]):
            self.generate(beginning, prefix.cache, 1, None)
            prefix.note(beginning)
        output = self.generate(ids, prefix.cache, ANSWER, streamer)
        store.give(prefix, output)
        answer = output[: len(ids) - 3] + output[len(ids) :] if self.rewritten else output
        self.ids = answer + torch.randint(2, 80, (QUESTION,)).tolist()
        return streamer.seconds, reused, len(ids)


def times(model, way: str) -> list[tuple[float, int, int]]:
    """Of each turn."""
    from torch_moe_metal.commands.common.prefix_folder import PrefixFolder
    from torch_moe_metal.commands.common.prefixes import Prefixes

    if way == "restarted":
        talk, found = Conversation(model), []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(TURNS):
                store = Prefixes(model, folder=PrefixFolder(Path(folder), 1e10, "0" * 64))
                found.append(talk.turn(store))
                store.close()
        return found
    store = Prefixes(model)
    talks = [Conversation(model, way == "rewritten") for _ in range(4 if way == "four" else 1)]
    turns = [[talk.turn(store) for talk in talks] for _ in range(TURNS)]
    return [(statistics.mean(each[0] for each in turn), *turn[0][1:]) for turn in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    import torch_moe_metal
    from tiny_models import tiny_model

    print(f"{'':28}{'turn 1, s':>10}{'turn 2':>8}{'turn 3':>8}   reused in turns 2 and 3")
    for family in options.families:
        model = tiny_model(family, **SIZES)
        torch_moe_metal.patch(model)
        for way in options.ways:
            (first, _, _), *later = times(model, way)
            ratios = "".join(f"{seconds / first:8.3f}" for seconds, _, _ in later)
            reused = ", ".join(f"{count:,} of {prompt:,}" for _, count, prompt in later)
            print(f"{f'{family}, {way}':28}{first:10.2f}{ratios}   {reused}", flush=True)


if __name__ == "__main__":
    main()
