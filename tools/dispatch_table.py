"""What decoding asks of the host and of the GPU's queue: `python tools/dispatch_table.py` prints the README's tables.

All on the simulated mps device, where kernels are counted. First a token of a model: the ops that reach the device, in
transformers as it is and in ours. Then each op of ours for one token of a Qwen3-30B-A3B block in bfloat16: dispatches,
the bytes bound to them, and the host's time per call beside torch.add's on the same device, where no kernel runs.
"""

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import metal_sim
import simulated
from tiny_models import tiny_model, tokens
from torch_moe_metal import bench_model
from torch_moe_metal.bench.calls import OPS, Call
from torch_moe_metal.bench.models import DEFAULT, MODELS

CALLS = 200


# ------------------------------------------------------------------------------------------------ a token of a model


@dataclass(frozen=True)
class Load:
    """What some computation asks of the device."""

    ops: int  # views and allocations left out, which only the host sees
    ours: int  # among them
    dispatches: int  # that ours encode; 0 where nothing counts them
    waits: list[str]  # ops that made the host wait for the device


def load_of(function: Callable[[], object], simulated: bool) -> Load:
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(metal_sim.record()) if simulated else metal_sim.Record()
        ops: Counter = stack.enter_context(bench_model.calls())
        function()
    ours = sum(n for op, n in ops.items() if op.startswith("moe_metal."))
    return Load(ops.total(), ours, len(record.dispatches), record.host_syncs)


def qwen3(device: str, layers: int) -> torch.nn.Module:
    """Qwen3-30B-A3B's layers, narrower: counts do not depend on widths, as long as the router is large enough to be
    split over two dispatches, as the real one is."""
    sizes = {"hidden_size": 640, "moe_intermediate_size": 16, "num_experts": 128, "num_experts_per_tok": 8}
    return tiny_model("qwen3_moe", device, num_hidden_layers=layers, **sizes).bfloat16()


def decoding(layers: int, device: str, simulated: bool) -> dict[str, tuple[Load, Load]]:
    """One decoding step of the whole model, and one token through a MoE block alone, in every way there is."""
    model, table = qwen3(device, layers), {}
    prompt, token = tokens(1, 8, device=device), tokens(1, 1, device=device)
    x = torch.ones(1, 1, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    for name, prepare in bench_model.variants(model, device).items():
        prepare()
        cache = model(prompt, use_cache=True).past_key_values
        step = partial(model, token, past_key_values=cache)
        table[name] = load_of(step, simulated), load_of(partial(model.model.layers[0].mlp, x), simulated)
    return table


def print_decoding(layers: int = 4) -> None:
    print(f"| one token, {layers} layers | ops | of ours | their dispatches | a MoE block alone: ops | dispatches |")
    print("|---|---|---|---|---|---|")
    for name, (step, block) in decoding(layers, "mps", simulated=True).items():
        print(f"| {name} | {step.ops} | {step.ours} | {step.dispatches} | {block.ops} | {block.dispatches} |")


# ------------------------------------------------------------------------------------------------ every op


def host_microseconds(functions: dict[str, Callable]) -> dict[str, float]:
    """The median time of a call; all take turns, so that what slows the machine slows them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(9):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.ops.metal_sim.clear()
    return {name: statistics.median(t) for name, t in times.items()}


def print_ops() -> None:
    functions = {}
    for op in (op for op in OPS if op != "block"):
        row = Call(op, DEFAULT, MODELS[DEFAULT], T=1)
        arguments = {
            name: torch.empty(row.size(letters), dtype=row.dtype_of(name), device="mps")
            for name, letters in row.shapes.items()
        }
        functions[op] = partial(getattr(torch.ops.moe_metal, op), **arguments, **row.options)
    x = torch.empty(1, 2048, dtype=torch.bfloat16, device="mps")
    with metal_sim.host_only():
        rows = {}
        for name, function in functions.items():
            function()  # compiles
            with metal_sim.record() as record:
                function()
            rows[name] = record
        times = host_microseconds(functions | {"torch.add": partial(torch.add, x, x)})
    add = times.pop("torch.add")
    print(f"| op, T = 1 | dispatches | MB bound | host us | x torch.add ({add:.1f} us) |\n|---|---|---|---|---|")
    for name, record in rows.items():
        megabytes = sum(d.buffer_bytes for d in record.dispatches) / 1e6
        print(f"| {name} | {len(record.dispatches)} | {megabytes:.2f} | {times[name]:.1f} | {times[name] / add:.1f} |")


@torch.no_grad()  # as generate() does
def main() -> None:
    simulated.load()
    print_decoding()
    print()
    print_ops()


if __name__ == "__main__":
    main()
