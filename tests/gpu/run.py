"""Replays what record.py wrote on an NVIDIA GPU: the project's own shaders, translated, on true parallel hardware.

    python tests/gpu/run.py FOLDER                   # every case against the float64 reference
    python tests/gpu/run.py FOLDER --bench           # times, beside the copy bandwidth and PyTorch's own CUDA ops
    python tests/gpu/run.py FOLDER --sanitizers      # compute-sanitizer's four tools, over every kernel
    python tests/gpu/run.py FOLDER --smallest        # what they run: small cases that launch every kernel
    python tests/gpu/run.py FOLDER --planted-race    # a broken kernel, which racecheck must catch

It needs torch with CUDA and this checkout, not the built extension. These are not Apple figures.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]


def without_the_extension() -> None:
    """`torch_moe_metal.reference` alone: the extension is not built on this machine."""
    package = types.ModuleType("torch_moe_metal")
    spec = importlib.util.spec_from_file_location(
        "torch_moe_metal.reference", ROOT / "torch_moe_metal" / "reference.py"
    )
    package.reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package.reference)
    sys.modules |= {"torch_moe_metal": package, "torch_moe_metal.reference": package.reference}


without_the_extension()
from bench_cases import BENCH  # noqa: E402
from cases import CASES, Args, Case, expected  # noqa: E402
from checks import assert_matches  # noqa: E402

# ------------------------------------------------------------------------------------------------ launching


class Cuda:
    """The driver's functions; a failure raises."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Callable:
        function = getattr(self.library, name)

        def call(*arguments):
            code = function(*arguments)
            if code:
                raise RuntimeError(f"{name}: CUDA error {code}")

        return call


class Arguments(ctypes.Structure):
    """shim/metal.h's struct of the same name."""

    _fields_ = [("buffers", ctypes.c_uint64 * 31), ("_pad", ctypes.c_uint64), ("bytes", (ctypes.c_ubyte * 512) * 4)]


class Kernels:
    """The kernels of every shader, by name."""

    def __init__(self, folder: Path):
        torch.zeros(1, device="cuda")  # makes the context
        self.cuda = Cuda()
        self.where: dict[str, Path] = {}
        files = sorted(folder.glob("*.ptx"))
        with ThreadPoolExecutor() as pool:
            list(pool.map(assemble, files))
        for file in files:
            for name in re.findall(r"^\.visible \.entry (\w+)", file.read_text(), re.MULTILINE):
                self.where[name] = file.with_suffix(".cubin")
        self.modules: dict[Path, ctypes.c_void_p] = {}
        self.functions: dict[str, ctypes.c_void_p] = {}

    def __getitem__(self, name: str) -> ctypes.c_void_p:
        if name not in self.functions:
            file = self.where[name]
            if file not in self.modules:
                self.modules[file] = module = ctypes.c_void_p()
                self.cuda.cuModuleLoadData(ctypes.byref(module), file.read_bytes())
            self.functions[name] = function = ctypes.c_void_p()
            self.cuda.cuModuleGetFunction(ctypes.byref(function), self.modules[file], name.encode())
        return self.functions[name]

    def launch(self, name: str, grid: list[int], threads: list[int], arguments: Arguments, shared: int = 0) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self.cuda.cuLaunchKernel(self[name], *grid, *threads, shared, stream, pointers, None)


def assemble(file: Path) -> None:
    target = file.with_suffix(".cubin")
    if not target.exists() or target.stat().st_mtime < file.stat().st_mtime:
        subprocess.run(["ptxas", "-arch=sm_90", "-lineinfo", str(file), "-o", str(target)], check=True)


class Replay:
    """One trace on real tensors."""

    def __init__(self, kernels: Kernels, trace: dict, args: Args, poison: bool = True):
        self.kernels, self.args = kernels, args
        self.tensors = dict(args)
        for name, length in trace["scratch"].items():
            self.tensors[name] = torch.empty(length, dtype=torch.uint8, device="cuda")
        for output in trace["outputs"]:
            if output["name"] not in args:
                dtype = getattr(torch, output["dtype"])
                self.tensors[output["name"]] = torch.empty(output["shape"], dtype=dtype, device="cuda")
        for name, tensor in self.tensors.items():
            if poison and name not in args:
                tensor.view(torch.uint8).fill_(0xFF)
        self.outputs = [self.tensors[output["name"]] for output in trace["outputs"]]
        self.launches = [(d["kernel"], d["grid"], d["threads"], self.packed(d)) for d in trace["dispatches"]]

    def packed(self, dispatch: dict) -> Arguments:
        packed = Arguments()
        for index, what, *offset in dispatch["arguments"]:
            if offset:
                packed.buffers[index] = self.tensors[what].untyped_storage().data_ptr() + offset[0]
            else:
                content = bytes.fromhex(what)
                ctypes.memmove(packed.bytes[index % 4], content, len(content))
        return packed

    def __call__(self) -> None:
        for launch in self.launches:
            self.kernels.launch(*launch)


# ------------------------------------------------------------------------------------------------ right answers


def on_gpu(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return empty.copy_(tensor)


def check(kernels: Kernels, traces: list[dict], poison: bool = True) -> int:
    cases = {str(case): case for case in CASES}
    wrong = 0
    for done, trace in enumerate(traces, 1):
        case = cases[trace["case"]]
        args = case.arguments()
        replay = Replay(kernels, trace, {name: on_gpu(tensor) for name, tensor in args.items()}, poison)
        replay()
        torch.cuda.synchronize()
        try:
            assert_matches(replay.outputs, expected(case.op, args, case.options, case.hostile), case.longest_sum)
        except AssertionError as error:
            wrong += 1
            print(f"FAILED {case}: {str(error)[:300]}", flush=True)
        if done % 200 == 0:
            print(f"  {done} of {len(traces)}", file=sys.stderr, flush=True)
    print(f"{len(traces) - wrong} passed, {wrong} failed", flush=True)
    return 1 if wrong else 0


# ------------------------------------------------------------------------------------------------ compute-sanitizer


def smallest(traces: list[dict]) -> list[dict]:
    """The samples, and for each kernel that they do not launch the smallest case that does."""
    elements = {str(case): case.elements for case in CASES}
    chosen = [trace for trace in traces if "-sample_" in trace["case"]]
    launched = {dispatch["kernel"] for trace in chosen for dispatch in trace["dispatches"]}
    for trace in sorted(traces, key=lambda trace: elements[trace["case"]]):
        kernels = {dispatch["kernel"] for dispatch in trace["dispatches"]}
        if kernels - launched:
            chosen.append(trace)
            launched |= kernels
    print(f"{len(chosen)} cases launch {len(launched)} kernels", flush=True)
    return chosen


def planted_race(kernels: Kernels) -> int:
    logits, output = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
    arguments = Arguments()
    arguments.buffers[0], arguments.buffers[1] = logits.data_ptr(), output.data_ptr()
    ctypes.memmove(arguments.bytes[2], ctypes.byref(ctypes.c_uint32(64)), 4)
    kernels.launch("softmax", [1, 1, 1], [64, 1, 1], arguments, shared=4 * 128)
    torch.cuda.synchronize()
    return 0


def sanitized(tool: str, folder: Path, mode: str) -> tuple[str, int]:
    """Runs one tool over this file's `mode`, and prints its closing line. -> its report, and 1 if it found something"""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    command += [sys.executable, __file__, str(folder), mode]
    done = subprocess.run(
        command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True
    )
    report = done.stdout + done.stderr
    closing = [line for line in report.splitlines() if line.startswith("=========")][-1:]
    rest = [line for line in done.stdout.splitlines() if not line.startswith("=========")]
    print(f"{tool:10} {mode:15} exit {done.returncode}: {' '.join(closing + rest)}", flush=True)
    return report, int(done.returncode != 0)


def sanitizers(folder: Path) -> int:
    """1 if a tool finds something in the project's kernels, or if racecheck misses the planted race."""
    unclean = 0
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        report, found = sanitized(tool, folder, "--smallest")
        unclean |= found
        if found:
            print(report[:3000], flush=True)
    report, caught = sanitized("racecheck", folder, "--planted-race")
    if not caught or "hazard" not in report:
        print(f"the planted race was missed\n{report[:3000]}")
        unclean = 1
    return unclean


# ------------------------------------------------------------------------------------------------ times


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A graph of the work, or None where it makes the host wait."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


class Eager:
    """Work that is replayed by doing it again."""

    def __init__(self, work: Callable[[], object]):
        self.replay = work


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph | Eager | None], sets: int) -> dict[str, float]:
    """The median over replays of each graph, per set of inputs; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name, graph in graphs.items() if graph}
    for _ in range(12):
        for name in times:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / sets)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def copy_bandwidth() -> tuple[float, str]:
    """GB/s of a large copy, bytes read and bytes written: the best of PyTorch's ways. A graph's copy is the slowest."""
    a, b = (torch.empty(1 << 29, device="cuda").normal_() for _ in range(2))
    ways = {
        "copy_ in a graph": captured(lambda: b.copy_(a)),
        "copy_": Eager(lambda: b.copy_(a)),
        "add(a, 0, out=b)": captured(lambda: torch.add(a, 0, out=b)),
        "mul(a, 1, out=b)": Eager(lambda: torch.mul(a, 1, out=b)),
    }
    speeds = {name: 2 * a.nbytes / time / 1e3 for name, time in microseconds(ways, 1).items()}
    print("copies, GB/s: " + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items()))
    best = max(speeds, key=speeds.get)
    return speeds[best], best


def drawn(case: Case, seed: int) -> Args:
    """Random arguments of a benchmark's case, made on the GPU."""
    random = torch.Generator("cuda").manual_seed(seed)
    args = {}
    for name, letters in case.shapes.items():
        size = case.size(letters)
        if name == "experts":
            scores = torch.rand(size[0], case.dims["E"], device="cuda", generator=random)
            args[name] = scores.topk(size[1]).indices.int()
        else:
            dtype = torch.float32 if name == "weights" else case.dtype
            args[name] = torch.empty(size, dtype=dtype, device="cuda").normal_(generator=random)
            args[name] *= size[-1] ** -0.5 if name in ("router_weight", "gate_up", "down") else 1
    return args


def moved_bytes(case: Case, args: Args) -> int:
    """What must be read and written once."""
    if case.op != "experts":
        return sum(tensor.nbytes for tensor in args.values()) + output_bytes(case)
    share = args["experts"].unique().numel() / case.dims["E"]
    weights = args["gate_up"].nbytes + args["down"].nbytes
    rest = sum(tensor.nbytes for tensor in args.values()) - weights
    return int(weights * share) + rest + output_bytes(case)


def output_bytes(case: Case) -> int:
    T, dims, size = case.dims["T"], case.dims, case.dtype.itemsize
    if case.op in ("gate", "route"):
        return T * dims["K"] * 8
    both = {"weighted_sum_residual_norm_": 2, "residual_norm": 2}.get(case.op, 1)
    return both * T * dims["I" if case.op == "glu" else "H"] * size


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def router(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.float().softmax(-1).topk(8)
    return weights / weights.sum(-1, keepdim=True), experts


def summed(slots: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.to(slots.dtype).unsqueeze(1), slots).squeeze(1)


def batched_mm(x, weights, experts, gate_up, down, residual):
    """transformers' decode: gathers a copy of each token's experts."""
    T, K = experts.shape
    ids = experts.reshape(-1)
    both = torch.bmm(gate_up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    gate, up = both.chunk(2, -1)
    slots = torch.bmm(down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (slots.view(T, K, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1) + residual


def grouped_mm(x, weights, experts, gate_up, down, residual):
    """transformers' prefill: sorted by expert, one grouped product each way."""
    T, K = experts.shape
    order = experts.reshape(-1).argsort()
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device="cuda")
    offsets = counts.scatter_add_(0, experts.reshape(-1).long(), torch.ones(T * K, dtype=torch.int32, device="cuda"))
    offsets = offsets.cumsum(0, dtype=torch.int32)
    both = torch._grouped_mm(x[order // K], gate_up.mT, offs=offsets)
    gate, up = both.chunk(2, -1)
    slots = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    slots = torch.empty_like(slots).index_copy_(0, order, slots)
    return (slots.view(T, K, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1) + residual


# PyTorch's own ways to the same result: the fastest counts.
RIVALS: dict[str, list[Callable]] = {
    "gate": [lambda hidden, router_weight, norm_weight: router(F.linear(norm(hidden, norm_weight), router_weight))],
    "route": [router],
    "glu": [lambda gate, up: F.silu(gate) * up],
    "weighted_sum": [lambda slots, weights, residual: summed(slots, weights) + residual],
    "weighted_sum_residual_": [lambda residual, slots, weights: residual.add_(summed(slots, weights))],
    "weighted_sum_residual_norm_": [
        lambda residual, slots, weights, norm_weight: norm(residual.add_(summed(slots, weights)), norm_weight)
    ],
    "weighted_sum_norm_add": [
        lambda slots, weights, residual, norm_weight: residual + norm(summed(slots, weights), norm_weight)
    ],
    "weighted_sum_dual_norm_add": [
        lambda slots, weights, residual, residual_norm_weight, moe_norm_weight: (
            norm(residual, residual_norm_weight) + norm(summed(slots, weights), moe_norm_weight)
        )
    ],
    "norm_add": [lambda residual, input, weight: residual + norm(input, weight)],
    "residual_norm": [lambda residual, input, weight: norm(residual + input, weight)],
    "experts": [batched_mm, grouped_mm],
}


def sets_of(case: Case) -> int:
    """How many sets of inputs a graph walks through, so that the 60 MB of L2 hold none of them for the next replay."""
    if case.op == "experts":
        return 8  # each with weights of its own
    return max(2, min(64, (512 << 20) // max(1, case.bytes)))


def measure(kernels: Kernels, case: Case, trace: dict) -> dict:
    sets = [drawn(case, seed) for seed in range(sets_of(case))]
    replays = [Replay(kernels, trace, args) for args in sets]
    graphs = {"ours": captured(lambda: [replay() for replay in replays])}
    for rival in RIVALS[case.op]:
        if rival is batched_mm and case.dims["T"] > 64:
            continue
        if rival is grouped_mm and case.dtype != torch.bfloat16:
            continue
        name = rival.__name__.replace("<lambda>", "eager")
        graphs[name] = captured(lambda rival=rival: [rival(**args) for args in sets])
    times = microseconds(graphs, len(sets))
    ours = times.pop("ours")
    best = min(times, key=times.get) if times else None
    total = statistics.mean(moved_bytes(case, args) for args in sets)
    rival = times[best] if best else float("nan")
    return {"us": ours, "bytes": total, "rival": rival, "rival name": best or "none"}


def bench(kernels: Kernels, traces: list[dict], only: list[str], out: Path | None) -> int:
    copy, way = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; copy bandwidth {copy:.0f} GB/s (read and written, {way})")
    print("The shaders of this project, translated; not Apple figures. us are medians of CUDA graph replays.")
    print(
        f"{'op':28} {'T':>5} {'dtype':>5} {'us':>9} {'floor us':>9} {'of copy':>8} {'PyTorch us':>11} {'x PyTorch':>9}"
    )
    cases, rows = {str(case): case for case in BENCH}, []
    for trace in traces:
        case = cases[trace["case"]]
        if only and case.op not in only:
            continue
        row = measure(kernels, case, trace)
        torch.cuda.empty_cache()
        floor = row["bytes"] / copy / 1e3
        tokens = int(case.name.removeprefix("bench-T"))
        dtype = {torch.float32: "f32", torch.bfloat16: "bf16"}[case.dtype]
        print(
            f"{case.op:28} {tokens:5} {dtype:>5} {row['us']:9.1f} {floor:9.1f} {floor / row['us']:8.0%} "
            f"{row['rival']:11.1f} {row['rival'] / row['us']:9.2f}  {row['rival name']}",
            flush=True,
        )
        rows.append({"op": case.op, "T": tokens, "dtype": dtype, "floor us": floor} | row)
    if out:
        out.write_text(json.dumps({"device": device, "copy GB/s": copy, "rows": rows}, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--sanitizers", action="store_true")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--planted-race", action="store_true")
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    if options.sanitizers:
        return sanitizers(options.folder)
    kernels = Kernels(options.folder)
    if options.planted_race:
        return planted_race(kernels)
    traces = json.loads((options.folder / ("bench.json" if options.bench else "cases.json")).read_text())
    if options.bench:
        return bench(kernels, traces, options.ops, options.json)
    if options.ops:
        traces = [trace for trace in traces if trace["case"].split("-")[0] in options.ops]
    if options.smallest:
        return check(kernels, smallest(traces), poison=False)  # initcheck would take poison for a value
    return check(kernels, traces)


if __name__ == "__main__":
    sys.exit(main())
