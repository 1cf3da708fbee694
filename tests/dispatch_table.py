"""What each op costs the host and the GPU's queue: `python tests/dispatch_table.py` prints the README's table.

On the simulated mps device, where kernels are counted and not run: dispatches, the bytes bound to them, and the host's
time per call beside torch.add's on the same device. One token through a Qwen3-30B-A3B block, bfloat16.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import metal_sim
import torch_moe_metal  # noqa: F401
from cases import call
from torch_moe_metal.bench.calls import OPS, Call
from torch_moe_metal.bench.models import DEFAULT, MODELS

CALLS = 200


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


@torch.inference_mode()
def main() -> None:
    metal_sim.load()
    functions = {}
    for op in (op for op in OPS if op != "block"):
        row = Call(op, DEFAULT, MODELS[DEFAULT], T=1)
        arguments = {
            name: torch.empty(row.size(letters), dtype=row.dtype_of(name), device="mps")
            for name, letters in row.shapes.items()
        }
        function = getattr(torch.ops.moe_metal, op)
        functions[op] = lambda function=function, row=row, arguments=arguments: call(
            function, row.op, arguments, row.options
        )
    x = torch.empty(1, 2048, dtype=torch.bfloat16, device="mps")
    with metal_sim.host_only():
        rows = {}
        for name, function in functions.items():
            function()  # compiles
            with metal_sim.record() as record:
                function()
            rows[name] = record
        times = host_microseconds(functions | {"torch.add": lambda: torch.add(x, x)})
    add = times.pop("torch.add")
    print(f"| op, T = 1 | dispatches | MB bound | host us | x torch.add ({add:.1f} us) |\n|---|---|---|---|---|")
    for name, record in rows.items():
        megabytes = sum(d.buffer_bytes for d in record.dispatches) / 1e6
        print(f"| {name} | {len(record.dispatches)} | {megabytes:.2f} | {times[name]:.1f} | {times[name] / add:.1f} |")


if __name__ == "__main__":
    main()
