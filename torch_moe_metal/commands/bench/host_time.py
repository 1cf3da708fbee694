"""The host's time per token: what Python, PyTorch's dispatcher and the ops take before a kernel runs.

Each family's model has tiny weights, so that kernels take almost no time, and `--layers` layers. Stock and patched take
turns in every round, on one thread; times are those of this thread (on mps without waits for the GPU) and the medians
of the rounds, and a ratio is the median of the rounds' ratios. `generate` includes its own ops: it is the difference
between answers of 64 and of 64 + `--tokens` tokens. A forward is one call of the model with a cache, and an answer of
16 tokens includes the prompt.

Dispatcher calls are those of one forward, counted by PyTorch's profiler: each call of an op from Python, ours or
PyTorch's, views too. What an op calls in turn is not counted, as in `linear`, which transposes its weight. A method of
a C++ class is no op, so it is not counted either, but the ops that it calls are.
"""

import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from ..common.cli import UNSAMPLED, CannotRun, has_transformers, positive
from ..common.devices import add_device, check_device
from ..common.progress import Progress
from . import DTYPES_BY_NAME, dtype
from .measure import machine
from .report import json_of

FAMILIES = ["qwen3_moe", "gpt_oss"]
PROMPT, SHORT, ANSWER = 8, 64, 16  # tokens
WARM, STEPS = 4, 32  # forwards of one token: before the measured ones, and measured
GENERATE, FORWARD, ANSWERS = "generate, us per token", "forward, us per token", f"answer of {ANSWER} tokens, us"
CALLS, VIEWS = "dispatcher calls per token", "of them views"


# ------------------------------------------------------------------------------------------------ dispatcher calls


@cache
def is_view(op: str) -> bool:
    """Whether an op, such as `aten::slice`, can return a view of an argument."""
    namespace, _, name = op.partition("::")
    overloads = getattr(getattr(torch.ops, namespace), name)
    return any(getattr(overloads, overload).is_view for overload in overloads.overloads())


def dispatcher_calls(function: Callable[[], object]) -> Counter[str]:
    """The ops that a function calls, without those that they call in turn. No dispatch mode is active meanwhile, so the
    function takes the same way as without being counted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        function()
    return Counter(event.name for event in profile.function_events if event.cpu_parent is None and "::" in event.name)


def counts(calls: Counter[str]) -> dict[str, int]:
    return {CALLS: calls.total(), VIEWS: sum(number for op, number in calls.items() if is_view(op))}


# ------------------------------------------------------------------------------------------------ times


def prepared(model: nn.Module) -> tuple[Tensor, Callable[[], object]]:
    """A prompt, and a function that computes one token after it, with a cache that has been used for some tokens."""
    from ...transformers.versions import cache_of, with_cache

    prompt = torch.arange(2, 2 + PROMPT, device=model.device)[None]
    cache = cache_of(model(prompt, use_cache=True))

    def step() -> None:
        model(prompt[:, :1], **with_cache(cache))

    for _ in range(WARM):
        step()
    return prompt, step


def microseconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return (time.thread_time() - start) * 1e6


def times(model: nn.Module, tokens: int) -> dict[str, float]:
    """One round."""
    prompt, step = prepared(model)

    def answer(length: int) -> float:
        return microseconds(lambda: model.generate(prompt, max_new_tokens=length, pad_token_id=0, **UNSAMPLED))

    short = answer(SHORT)
    return {
        GENERATE: (answer(SHORT + tokens) - short) / tokens,
        FORWARD: statistics.median(microseconds(step) for _ in range(STEPS)),
        ANSWERS: answer(ANSWER),
    }


# ------------------------------------------------------------------------------------------------ families


def families(names: list[str]) -> list[str]:
    """The families of these names that the installed transformers has; `all` means each that `patch` fuses."""
    from transformers import CONFIG_MAPPING

    from ...transformers.fusing.tiny_models import CONFIGS

    known = [name for name in CONFIGS if name in CONFIG_MAPPING]
    if unknown := [name for name in names if name not in [*known, "all"]]:
        raise CannotRun(f"--families {' '.join(unknown)}: expected some of {' '.join(known)}, or all")
    return known if "all" in names else names


def models(family: str, options: Namespace) -> dict[str, nn.Module]:
    """The tiny model, stock and patched."""
    from ...transformers import patch
    from ...transformers.fusing.tiny_models import tiny_model, with_layers
    from ...warmup import wait_for_all

    sizes = with_layers(family, options.layers) | {"max_position_embeddings": PROMPT + SHORT + options.tokens}
    made = {name: tiny_model(family, options.device, **sizes).to(options.dtype) for name in ("stock", "patched")}
    for model in made.values():
        model.generation_config.eos_token_id = model.get_input_embeddings().num_embeddings  # no token: it never ends
    patch(made["patched"])
    wait_for_all()
    return made


def ratio(rows: dict[str, list[dict[str, float]]], key: str) -> float:
    return statistics.median(
        patched[key] / stock[key] for stock, patched in zip(rows["stock"], rows["patched"], strict=True)
    )


def measure(family: str, options: Namespace, progress: Progress) -> dict[str, dict[str, float]]:
    """The figures of a family: each of stock and patched, and their ratio."""
    made = models(family, options)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    counted = {name: counts(dispatcher_calls(prepared(model)[1])) for name, model in made.items()}  # warms up, too
    for _ in range(options.rounds):
        for name, model in made.items():
            progress.next(f"{family}, {name}")
            rows[name].append(times(model, options.tokens) | counted[name])
    return {
        key: {
            **{name: statistics.median(row[key] for row in found) for name, found in rows.items()},
            "ratio": ratio(rows, key),
        }
        for key in rows["stock"][0]
    }


# ------------------------------------------------------------------------------------------------ the command


def table(family: str, found: dict[str, dict[str, float]]) -> str:
    lines = [f"\n{family:32}{'stock':>10}{'patched':>10}{'ratio':>8}"]
    for key, row in found.items():
        lines.append(f"  {key:30}{row['stock']:>10.0f}{row['patched']:>10.0f}{row['ratio']:>8.3f}")
    return "\n".join(lines)


def add_arguments(parser: ArgumentParser) -> None:
    add_device(parser)
    names = f"model types such as qwen3_moe, or all (default: {' '.join(FAMILIES)})"
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="NAME", help=names)
    parser.add_argument("--layers", type=positive, default=48, help="number of layers (default: 48)")
    tokens = "tokens over which generate is measured (default: 256)"
    parser.add_argument("--tokens", type=positive, default=256, help=tokens)
    types = f"{', '.join(DTYPES_BY_NAME)} (default: f32, whose tiny products on the CPU are the fastest)"
    parser.add_argument("--dtype", type=dtype, default=torch.float32, metavar="DTYPE", help=types)
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def run(options: Namespace) -> int:
    from ... import __version__

    try:
        check_device(options.device)
        if not has_transformers():
            raise CannotRun("transformers is not installed: `pip install transformers`")
        names = families(options.families)
    except CannotRun as reason:
        print(f"bench-host: {reason}", file=sys.stderr)
        return 2
    about = {"torch_moe_metal": __version__, "torch": torch.__version__, "device": options.device}
    about |= {"dtype": str(options.dtype).removeprefix("torch."), "layers": options.layers}
    about |= {"tokens": options.tokens, "rounds": options.rounds}
    if not options.json:
        print("   ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found, progress = {}, Progress(2 * options.rounds * len(names), wanted=not options.json)
    with one_thread():
        for family in names:
            found[family] = measure(family, options, progress)
            progress.clear()
            if not options.json:
                print(table(family, found[family]), flush=True)
    if options.json:
        print(json_of({**machine(), **about, "families": found}))
    return 0
