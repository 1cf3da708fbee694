"""Generates with a tiny MoE model for a given time, and checks that its memory stays bounded.

    python tools/soak.py --minutes 30 --device mps
    python tools/soak.py --minutes 30 --device cpu --threads 4

A patched model continues prompts of random lengths, in several threads at once. Between two rounds, when nothing runs,
this checks the process's memory and the live Metal objects, which are counted on the simulated mps; one prompt must
still give the same tokens as at first. In the last third of the time nothing may exceed the maximum of the second
third. The exit code is 1 if anything does.
"""

import argparse
import ctypes
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch_moe_metal
from mps import why_not
from tiny_models import tiny_model, tokens
from torch_moe_metal.commands.common.cli import positive

SIMULATED = sys.platform != "darwin"
NEW_TOKENS = 8
# The longest prompt for each device.
LONGEST = {"cpu": 2048, "mps": 48}
SIZES = {"cpu": {"hidden_size": 1024, "max_position_embeddings": 4096}, "mps": {}}
ALLOWED_MIB = 32  # allowed growth: caches of threads vary by this much from minute to minute


# ------------------------------------------------------------------------------------------------ looking


@dataclass(frozen=True)
class Sample:
    """Memory and objects of the process while it computes nothing."""

    seconds: float
    generated: int  # tokens so far
    memory: float  # MiB in use
    objects: dict[str, int]  # live Metal objects, by kind; on a real mps device, the bytes of tensors

    def __str__(self) -> str:
        objects = ", ".join(f"{count} {kind}" for kind, count in self.objects.items() if count)
        done = f"{self.seconds / 60:6.2f} min {self.generated:8} tokens"
        return f"{done}  {self.memory:7.1f} MiB in use  {objects}".rstrip()


def memory() -> float:
    """MiB of this process in use."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)  # memory that malloc keeps for reuse is no leak
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        resident = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True)
        return int(resident.stdout) / 1024
    lines = (line.split() for line in rollup.read_text().splitlines()[1:])
    kib = {words[0]: int(words[1]) for words in lines}
    return (kib["Rss:"] - kib["LazyFree:"]) / 1024


def objects(device: str) -> dict[str, int]:
    if device == "cpu":
        return {}
    torch.mps.synchronize()
    if not SIMULATED:
        return {"bytes of tensors": torch.mps.current_allocated_memory()}
    import metal_sim

    torch.ops.metal_sim.clear()  # the simulator's list of dispatches would grow
    return metal_sim.live_objects()


# ------------------------------------------------------------------------------------------------ judging


def faults(samples: list[Sample]) -> list[str]:
    """Unbounded values. The first third, in which everything is compiled and cached, does not count."""
    third = max(1, len(samples) // 3)
    middle, last = samples[third:-third], samples[-third:]
    found = []
    before, after = (statistics.median(sample.memory for sample in part) for part in (middle, last))
    if after > before + ALLOWED_MIB:
        found.append(f"memory in use grew from {before:.1f} to {after:.1f} MiB")
    for kind in last[-1].objects:
        before, after = (max(sample.objects.get(kind, 0) for sample in part) for part in (middle, last))
        if after > before:
            found.append(f"live {kind} grew from {before} to {after}")
    return found


# ------------------------------------------------------------------------------------------------ generating


def make_model(device: str) -> torch.nn.Module:
    if device == "mps" and SIMULATED:
        import simulated

        simulated.load()
    model = tiny_model("qwen3_moe", device, **SIZES[device])
    assert torch_moe_metal.patch(model)["fused"]
    return model


def generate(model: torch.nn.Module, length: int, seed: int = 1) -> list[int]:
    ids = tokens(1, length, device=model.device, seed=seed)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()


def lengths(longest: int):
    """The longest and the shortest prompts first, then random ones, as many short as long ones."""
    random = Random(0)
    return itertools.chain([longest, 1], (round(longest ** random.random()) for _ in itertools.count()))


def soak(model: torch.nn.Module, seconds: float, threads: int, report: Callable[[Sample], None]) -> list[Sample]:
    device, start, samples = model.device.type, time.monotonic(), []
    each, seeds, generated = lengths(LONGEST[device]), itertools.count(), 0
    first = generate(model, 5)
    with ThreadPoolExecutor(threads) as pool:
        while not samples or samples[-1].seconds < seconds or len(samples) < 6:
            until = time.monotonic() + seconds / 100
            while generated == 0 or time.monotonic() < until:
                work = [pool.submit(generate, model, next(each), next(seeds)) for _ in range(threads)]
                generated += sum(len(done.result()) for done in work)
            if generate(model, 5) != first:
                raise AssertionError("one prompt, and other tokens than at first")
            samples.append(Sample(time.monotonic() - start, generated, memory(), objects(device)))
            report(samples[-1])
    return samples


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="default: 30")
    parser.add_argument("--device", choices=list(LONGEST), default="cpu")
    parser.add_argument("--threads", type=positive, default=4, help="that generate at once (default: 4)")
    options = parser.parse_args(arguments)
    if options.device == "mps" and not SIMULATED and (why := why_not()):
        parser.error(why)
    model = make_model(options.device)
    samples = soak(model, options.minutes * 60, options.threads, lambda sample: print(sample, flush=True))
    found = faults(samples)
    print("\n".join(found) or "bounded: memory and Metal objects, and the same tokens to the end")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
