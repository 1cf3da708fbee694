"""Counts host and GPU work of decoding: `python tools/dispatch_table.py --json` prints the figures of the tables in
BENCHMARKS.md; without --json the output is easier to read.

It runs on the simulated mps device, where kernels are counted. First, one token of a model: the ops that reach the
device, in stock transformers and patched. Then the same for one layer of each family whose attention is fused. Then
each op for one token of a Qwen3-30B-A3B block in bfloat16, with dense and packed weights: dispatches, bytes bound to
them, and host time per call, next to that of torch.add on the same device, where no kernel runs. Commits, which submit
encoded work to the GPU, happen after several calls, so they are averaged.

    python tools/dispatch_table.py --costs --model qwen3-30b-a3b --tokens 32,512

prints instead the work of the kernels of `experts`, counted by the simulator: bytes, matrix operations, barriers. This
is a proxy for GPU time, not a time. For dispatches with many threadgroups only a sample runs. Takes minutes; --before
FILE adds the figures of an older --json.
"""

import argparse
import contextlib
import json
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
import torch_moe_metal
from benchmarks import rows_of_costs, rows_of_dispatches
from tiny_models import tiny_model, tokens
from torch_moe_metal import arguments, packing
from torch_moe_metal.arguments import ARGUMENTS, scale_names
from torch_moe_metal.commands.bench import whole_model
from torch_moe_metal.commands.bench.calls import OPS, Call, RandomTensors
from torch_moe_metal.commands.bench.measure import machine
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS
from torch_moe_metal.commands.bench.report import json_of
from torch_moe_metal.transformers.versions import cache_of, with_cache

CALLS = 200
STEPS = 16  # number of steps over which commits are averaged


# ------------------------------------------------------------------------------------------------ a token of a model


@dataclass(frozen=True)
class Load:
    """The work of a computation on the device."""

    ops: int  # without views and allocations, which only run on the host
    ours: int  # those of them that are ours
    dispatches: int  # encoded by ours; 0 if they are not counted
    waits: list[str]  # ops that made the host wait for the device
    commits: float  # by ours, on average


def commits_of(function: Callable[[], object]) -> float:
    with metal_sim.record() as record:
        for _ in range(STEPS):
            function()
    return record.commits / STEPS


def load_of(function: Callable[[], object], simulated: bool) -> Load:
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(metal_sim.record()) if simulated else metal_sim.Record()
        ops: Counter = stack.enter_context(whole_model.calls())
        function()
    ours = sum(n for op, n in ops.items() if op.startswith("moe_metal."))
    commits = commits_of(function) if simulated else 0.0
    return Load(ops.total(), ours, len(record.dispatches), record.host_syncs, commits)


def qwen3(device: str, layers: int) -> torch.nn.Module:
    """Qwen3-30B-A3B's layers with smaller sizes: counts do not depend on them, if the router is large enough to be
    split over two dispatches like the real one."""
    sizes = {"hidden_size": 640, "moe_intermediate_size": 16, "num_experts": 128, "num_experts_per_tok": 8}
    return tiny_model("qwen3_moe", device, num_hidden_layers=layers, **sizes).bfloat16()


def decoding(layers: int, device: str, simulated: bool) -> dict[str, tuple[Load, Load]]:
    """One decoding step of the whole model, and one token through a MoE block, with every implementation."""
    model, table = qwen3(device, layers), {}
    prompt, token = tokens(1, 8, device=device), tokens(1, 1, device=device)
    x = torch.ones(1, 1, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    for name, prepare in whole_model.variants(model, device).items():
        prepare()
        cache = cache_of(model(prompt, use_cache=True))
        step = partial(model, token, **with_cache(cache))
        table[name] = load_of(step, simulated), load_of(partial(model.model.layers[0].mlp, x), simulated)
    return table


def decoding_rows(layers: int) -> dict[str, dict[str, int]]:
    return {
        name: {
            "ops": step.ops,
            "ours": step.ours,
            "dispatches": step.dispatches,
            "commits": step.commits,
            "block_ops": block.ops,
            "block_dispatches": block.dispatches,
        }
        for name, (step, block) in decoding(layers, "mps", simulated=True).items()
    }


#: Families whose layers are counted; the first layers of DeepSeek-V3's and GLM-4's are dense.
LAYERS = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "minimax_m2", "qwen2_moe", "glm4_moe", "deepseek_v3")


def load_of_a_layer(family: str, device: str, simulated: bool, patched: bool) -> Load:
    """The work that the fourth layer of a model adds for one decoded token."""
    loads = []
    for layers in (3, 4):
        model = tiny_model(family, device, num_hidden_layers=layers).bfloat16()
        if patched:
            torch_moe_metal.patch(model)
        with torch.no_grad():
            cache = cache_of(model(tokens(1, 8, device=device), use_cache=True))
            token = tokens(1, 1, device=device)
            model(token, **with_cache(cache))  # grows the cache
            loads.append(load_of(partial(model, token, **with_cache(cache)), simulated))
    three, four = loads
    more = (getattr(four, name) - getattr(three, name) for name in ("ops", "ours", "dispatches"))
    return Load(*more, four.waits[len(three.waits) :], four.commits - three.commits)


def layer_rows() -> dict[str, dict[str, int]]:
    rows = {}
    for family in LAYERS:
        stock, ours = (load_of_a_layer(family, "mps", True, patched) for patched in (False, True))
        rows[family] = {"stock": stock.ops, "ops": ours.ops, "ours": ours.ours, "dispatches": ours.dispatches}
    return rows


# ------------------------------------------------------------------------------------------------ every op


def host_microseconds(functions: dict[str, Callable]) -> dict[str, float]:
    """The median time of a call. All calls take turns, so that a slow phase of the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(9):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.ops.metal_sim.clear()
    return {name: statistics.median(t) for name, t in times.items()}


#: The measured formats of packed weights: format, bits, group size.
PACKED = (("affine", 4, 64), ("mxfp4", 4, packing.MXFP4_GROUP), ("fp8", 8, packing.FP8_BLOCK))
PREFILL = 512  # tokens


def empty_arguments(call: Call, format: str, bits: int, group: int) -> dict[str, torch.Tensor]:
    """The call's uninitialised arguments, with weights in a format."""
    found = {}
    for name, letters in call.shapes.items():
        parts = {"data": (call.size(letters), call.dtype_of(name))}
        if format != "dense" and ARGUMENTS[call.op][name].kind == "weight":
            parts = packing.packed_sizes(call.size(letters), format, bits, group, call.dtype)
        names = dict(zip(("data", "scale", "offset"), (name, *scale_names(name)), strict=True))
        found |= {names[part]: torch.empty(size, dtype=dtype, device="mps") for part, (size, dtype) in parts.items()}
    return found


def function_of(
    op: str,
    T: int = 1,
    format: str = "dense",
    bits: int = 4,
    group: int = 64,
    model: str = DEFAULT,
    **given: torch.Tensor,
) -> Callable:
    """Arguments that are not given are uninitialised."""
    sizes = MODELS[model]
    call = Call(op, model, sizes if format == "dense" else sizes.packed, T)
    options = call.options | arguments.options(op, {"format": format, "bits": bits})
    tensors = empty_arguments(call, format, bits, group) | given
    return partial(getattr(torch.ops.moe_metal, op), **tensors, **options)


def packed_functions() -> dict[str, Callable]:
    """The ops with packed weights in each of their formats; `experts` also for many tokens."""
    functions = {}
    for format, bits, group in PACKED:
        for op in filter(arguments.takes_formats, ARGUMENTS):
            functions[f"{op}, {format}"] = function_of(op, 1, format, bits, group)
        functions[f"experts, {format}, T = {PREFILL}"] = function_of("experts", PREFILL, format, bits, group)
    return functions


def recorded(functions: dict[str, Callable]) -> dict[str, metal_sim.Record]:
    rows = {}
    for name, function in functions.items():
        function()  # compiles
        with metal_sim.record() as record:
            function()
        rows[name] = record
    return rows


def op_rows() -> dict[str, dict[str, float]]:
    with metal_sim.host_only():
        functions = {op: function_of(op) for op in OPS if op != "block"} | packed_functions()
        rows, commits = recorded(functions), {name: commits_of(function) for name, function in functions.items()}
        x = torch.empty(1, 2048, dtype=torch.bfloat16, device="mps")
        times = host_microseconds(functions | {"torch.add": partial(torch.add, x, x)})
    add = times.pop("torch.add")
    return {
        name: {
            "dispatches": len(record.dispatches),
            "commits": commits[name],
            "mb_bound": sum(d.buffer_bytes for d in record.dispatches) / 1e6,
            "host_us": times[name],
            "x_add": times[name] / add,
        }
        for name, record in rows.items()
    }


# ------------------------------------------------------------------------------------------------ what kernels do

#: Models, formats of their weights, and tokens of a call: decoding, then prefill.
COSTED = {"qwen3-30b-a3b": ("dense",), "mixtral-8x7b": ("dense",), "gpt-oss-20b": ("dense", "mxfp4")}
TOKENS = (1, 32, 128, 512, 4096)
#: Threadgroups of a dispatch that run. More than there are experts: the kernel that sorts slots must run completely.
SAMPLE = 256
MATRIX = 8 * 8 * 8  # multiply-adds of one matrix multiplication


def costs_row(model: str, format: str, T: int, sample: int) -> dict:
    """`experts` with uninitialised weights: costs depend only on the ids, which are random."""
    m = MODELS[model]
    ids = RandomTensors("cpu", torch.float32).sample_ids(T, m.E, m.K).to("mps")
    with metal_sim.host_only():  # so that weights take no memory
        function = function_of("experts", T, format, group=packing.MXFP4_GROUP, model=model, ids=ids)
    with metal_sim.record(costs=True, sample=sample) as record:
        function()
    needed = T * m.K * 3 * m.H * m.I
    total = sum((d.costs for d in record.dispatches), metal_sim.Costs())
    kernels = [{"kernel": d.kernel, "grid": d.grid, **costs_in_words(d.costs)} for d in record.dispatches]
    useful = needed / (MATRIX * total.matrix_multiplications) if total.matrix_multiplications else None
    return {
        "model": model,
        "format": format,
        "T": T,
        "useful_rows": useful,
        **costs_in_words(total),
        "kernels": kernels,
    }


def costs_in_words(costs: metal_sim.Costs) -> dict:
    matrices = costs.matrix_multiplications
    return {
        "threadgroups": costs.threadgroups,
        "threadgroups_run": costs.threadgroups_run,
        "device_mb_loaded": costs.device_loaded / 1e6,
        "device_mb_stored": costs.device_stored / 1e6,
        "constant_mb_loaded": costs.constant_loaded / 1e6,
        "threadgroup_mb": costs.threadgroup_bytes / 1e6,
        "threadgroup_bytes_per_matrix": costs.threadgroup_bytes / matrices if matrices else None,
        "matrices": matrices,
        "barriers": costs.threadgroup_barriers,
        "simdgroup_barriers": costs.simdgroup_barriers,
        "simd_functions": costs.simd_functions,
    }


def costs_rows(models: list[str], tokens: list[int], sample: int) -> list[dict]:
    rows = []
    for model in models:
        for format in COSTED[model]:
            for T in tokens:
                start = time.perf_counter()
                rows.append(costs_row(model, format, T, sample))
                print(f"{model}, {format}, T = {T}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rows


def costs_found(options: argparse.Namespace) -> dict:
    rows = costs_rows(options.model or list(COSTED), options.tokens, options.sample)
    found = {"dtype": "bf16", "sample": options.sample, "rows": rows}
    return found | ({"before": json.loads(options.before.read_text())["rows"]} if options.before else {})


def dispatches_found(options: argparse.Namespace) -> dict:
    return {
        "layers": options.layers,
        "rows": decoding_rows(options.layers),
        "families": layer_rows(),
        "ops": op_rows(),
    }


@torch.no_grad()  # as in generate()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument("--costs", action="store_true", help="print what the kernels of `experts` do instead")
    parser.add_argument("--model", action="append", choices=COSTED, help="for --costs; more than once for more")
    parser.add_argument("--tokens", type=lambda text: [int(T) for T in text.split(",")], default=list(TOKENS))
    parser.add_argument("--sample", type=int, default=SAMPLE, help="threadgroups of a dispatch that run (--costs)")
    parser.add_argument("--before", type=Path, help="an older output of --costs --json, for comparison")
    options = parser.parse_args()
    simulated.load()
    about = {**machine(), "torch": torch.__version__, "device": "simulated mps"}
    found = about | (costs_found(options) if options.costs else dispatches_found(options))
    show = partial(rows_of_costs, kernels=True) if options.costs else rows_of_dispatches
    print(json_of(found) if options.json else show(found))


if __name__ == "__main__":
    main()
