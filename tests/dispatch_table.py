"""What each op costs the host and the GPU's queue: `python tests/dispatch_table.py` prints the README's table.

On the simulated mps device, where kernels are counted and not run: dispatches, the bytes bound to them, and the host's
time per call beside torch.add's on the same device. One token through a Qwen3-30B-A3B block, bfloat16.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]

import metal_sim  # noqa: E402
import torch_moe_metal  # noqa: E402, F401
from bench_cases import OPS, bench_case  # noqa: E402
from cases import BFLOAT, call  # noqa: E402

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
    for op in OPS:
        case = replace(bench_case(op, 1), dtype=BFLOAT)
        arguments = {}
        for name, tensor in replace(case, dims=case.dims | {"E": 8}).arguments().items():
            size = case.size(case.shapes[name])
            arguments[name] = torch.empty(size, dtype=tensor.dtype, device="mps")
        function = getattr(torch.ops.moe_metal, op)
        functions[op] = lambda function=function, case=case, arguments=arguments: call(
            function, case.op, arguments, case.options
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
