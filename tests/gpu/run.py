"""Replays the traces of record.py on an NVIDIA GPU: the project's own shaders, translated, on real parallel hardware.

    python tests/gpu/run.py FOLDER                   # every case against the float64 reference
    python tests/gpu/run.py FOLDER --bench ...       # times: `python -m torch_moe_metal bench`, with its arguments
    python tests/gpu/run.py FOLDER --packed          # packed weights at real sizes: correctness and times
    python tests/gpu/run.py FOLDER --sanitizers      # compute-sanitizer's four tools, over every kernel
    python tests/gpu/run.py FOLDER --all             # these four
    python tests/gpu/run.py FOLDER --tune            # the search of `python -m torch_moe_metal tune`, on tune.json
    python tests/gpu/run.py FOLDER --smallest        # small cases that launch every kernel, as --sanitizers runs them
    python tests/gpu/run.py FOLDER --planted-race    # a broken kernel, which racecheck must catch

It needs torch with CUDA and this checkout, but not the built extension. These are not Apple figures.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]


def without_the_extension(folder: Path) -> None:
    """Make the checkout's Python modules importable without the built extension: the package without its __init__,
    and with the tables of formats that record.py wrote."""
    package, library = types.ModuleType("torch_moe_metal"), types.ModuleType("torch_moe_metal.extension")
    package.__path__ = [str(ROOT / "torch_moe_metal")]
    package.__version__, package.cpu_isa = "(a checkout)", "none"
    library.format_tables = json.loads((folder / "formats.json").read_text())
    sys.modules |= {"torch_moe_metal": package, "torch_moe_metal.extension": library}


if "torch_moe_metal" not in sys.modules and "--help" not in sys.argv:
    without_the_extension(Path(sys.argv[1]))
from cases import CASES, Args, expected  # noqa: E402
from checks import assert_matches, meets_infinity, placed  # noqa: E402
from packed_rows import BFLOAT, ROWS, Row  # noqa: E402
from torch_moe_metal import reference  # noqa: E402
from torch_moe_metal.commands import bench, tune  # noqa: E402
from torch_moe_metal.commands.bench import device_bench, measure  # noqa: E402
from torch_moe_metal.commands.bench.baselines import baselines, too_large  # noqa: E402
from torch_moe_metal.commands.bench.block import Block, expert_bytes, plain  # noqa: E402
from torch_moe_metal.commands.bench.calls import (  # noqa: E402
    EXPERTS,
    WORTH_A_LIMIT,
    Call,
    RandomTensors,
    choices,
    inputs,
    moved,
    wanted_formats,
    wanted_ops,
)
from torch_moe_metal.commands.bench.model_sizes import DEFAULT, MODELS  # noqa: E402
from torch_moe_metal.commands.bench.report import Result  # noqa: E402
from torch_moe_metal.commands.common.cli import CannotRun  # noqa: E402
from torch_moe_metal.reference import tolerance  # noqa: E402

# ------------------------------------------------------------------------------------------------ launching


class Cuda:
    """The functions of the CUDA driver; a failure raises."""

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
    """The struct of the same name in shim/metal.h."""

    _fields_ = [("buffers", ctypes.c_uint64 * 31), ("_pad", ctypes.c_uint64), ("bytes", (ctypes.c_ubyte * 640) * 4)]


class Kernels:
    """The kernels of every shader, by name."""

    def __init__(self, folder: Path):
        torch.zeros(1, device="cuda")  # creates the context
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


# ------------------------------------------------------------------------------------------------ correctness


def check(kernels: Kernels, traces: list[dict], poison: bool = True) -> int:
    cases = {str(case): case for case in CASES}
    wrong = 0
    for done, trace in enumerate(traces, 1):
        case = cases[trace["case"]]
        args = case.arguments()
        replay = Replay(kernels, trace, {name: placed(tensor, "cuda") for name, tensor in args.items()}, poison)
        replay()
        torch.cuda.synchronize()
        try:
            want = expected(case.op, args, case.options, case.hostile)
            assert_matches(replay.outputs, want, case.longest_sum, meets_infinity(case.op, args, case.options, "mps"))
        except AssertionError as error:
            wrong += 1
            print(f"FAILED {case}: {str(error)[:300]}", flush=True)
        if done % 200 == 0:
            print(f"  {done} of {len(traces)}", file=sys.stderr, flush=True)
    print(f"{len(traces) - wrong} passed, {wrong} failed", flush=True)
    return 1 if wrong else 0


# ------------------------------------------------------------------------------------------------ compute-sanitizer


def smallest(traces: list[dict]) -> list[dict]:
    """The samples, and the smallest case for each kernel that the samples do not launch."""
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
    """Run one tool over this file's `mode`, and print its last line. -> its report, and 1 if it found something"""
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
    """Return 1 if a tool finds something in the project's kernels, or if racecheck misses the planted race."""
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
    """A graph of the work, or None if it makes the host wait."""
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
    """Work that is replayed by calling it again."""

    def __init__(self, work: Callable[[], object]):
        self.replay = work


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph | Eager | None], sets: int) -> dict[str, float]:
    """Microseconds of each graph per set of inputs: the median over replays."""
    return {name: statistics.median(times) for name, times in rounds_of(graphs, sets).items()}


def rounds_of(graphs: dict[str, torch.cuda.CUDAGraph | Eager | None], sets: int) -> dict[str, list[float]]:
    """Microseconds of each graph's replays, per set of inputs; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name, graph in graphs.items() if graph}
    for _ in range(12):
        for name in times:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / sets)
    return {name: t[2:] for name, t in times.items()}


class Limits:
    """The fastest of PyTorch's ways to read and to copy, with and without a graph, in which a copy can be slower."""

    BYTES = 2 << 30
    when = "once, before the rows"

    def __init__(self):
        self.gb_per_s: dict[str, float] = {}
        self.names: dict[str, str] = {}
        for limit, ways, times_moved in (("read", measure.reads, 1), ("copy", measure.copies, 2)):
            works = {name: way for name, way in ways("cuda", self.BYTES).items() if measure.works(way)}
            graphs = {name: Eager(way) for name, way in works.items()}
            graphs |= {f"{name} in a graph": captured(way) for name, way in works.items()}
            times = microseconds(graphs, 1)
            self.names[limit] = fastest = min(times, key=times.get)
            self.gb_per_s[limit] = times_moved * self.BYTES / times[fastest] / 1e3


class Chain:
    """Two replays; the second takes the outputs of the first."""

    def __init__(self, first: Replay, then: Replay):
        self.first, self.then, self.outputs = first, then, then.outputs

    def __call__(self) -> None:
        self.first()
        self.then()


# The work of a row: our replays for each set of inputs, PyTorch's ways, and the bytes read.
Work = tuple[list[Replay | Chain], dict[str, Callable], float]


def parts_of(op: str) -> tuple[str, ...]:
    return ("gate", "experts") if op == "block" else (op,)


def parts(call: Call) -> list[Call]:
    """The calls whose traces make up a row. A block's shared expert is PyTorch's own, and has no trace."""
    return [] if call.op == "block" and call.model.S else [replace(call, op=op) for op in parts_of(call.op)]


class Translated:
    """The device of `bench` here: recorded rows, each in a CUDA graph."""

    has_mlx = False

    def __init__(self, folder: Path, options: argparse.Namespace):
        if wanted_formats(options) != ["dense"]:
            raise CannotRun("here packed formats are timed by `run.py FOLDER --packed`")
        self.model = options.model or DEFAULT
        recorded = json.loads((folder / "bench.json").read_text())
        self.traces = {trace["case"]: trace for trace in recorded}
        self.calls = self.recorded(options)
        if not self.calls:
            raise CannotRun(f"{folder} has no such row; `record.py FOLDER --model {self.model}` records more")
        self.kernels, self.limits = Kernels(folder), Limits()
        self.notes = [
            "These are the project's shaders translated for an NVIDIA GPU, replayed in CUDA graphs: no Apple figures.",
            "Their matrix products (experts from 32 tokens on) are made for 8 by 8, so that their speed says little.",
        ]

    def recorded(self, options: argparse.Namespace) -> list[Call]:
        """The selected rows."""
        calls = []
        for dtype in options.dtypes:
            for op in wanted_ops(options):
                names = [name for name in self.traces if name.startswith(f"{parts_of(op)[-1]}-")]
                tokens = options.tokens or sorted({int(name.split("-T")[-1].split("-")[0]) for name in names})
                for which in choices(op, self.model):
                    calls += [Call(op, self.model, MODELS[self.model], T, dtype, which=which) for T in tokens]
        return [call for call in calls if parts(call) and all(str(part) in self.traces for part in parts(call))]

    def about(self) -> dict[str, object]:
        return {"device": f"{torch.cuda.get_device_name()}, translated shaders", "torch": torch.__version__}

    def measure(self, call: Call) -> Result:
        torch.cuda.empty_cache()
        noise = RandomTensors("cuda", call.dtype)
        sets = [inputs(call, noise) for _ in range(call.sets)]
        replays, ways, bytes = (self.block if call.op == "block" else self.op)(call, noise, sets)
        theirs = [device_bench.for_baselines(s) for s in sets]
        result = Result(call, bytes)
        ways = self.agreeing(call, replays[0], ways, theirs[0], result.failed)
        if "ours" in result.failed:
            return result
        graphs = {"ours": captured(lambda: [replay() for replay in replays])}
        for name, way in ways.items():
            graphs[name] = captured(lambda way=way: [way(**s) for s in theirs])
            if graphs[name] is None:
                result.failed[name] = "it makes the host wait, so no graph can hold it"
        result.seconds = {name: us / 1e6 for name, us in microseconds(graphs, len(sets)).items()}
        if result.bytes >= WORTH_A_LIMIT:
            result.limits = self.limits.gb_per_s
        return result

    def op(self, call: Call, noise: RandomTensors, sets: list[Args]) -> Work:
        shared = {name: noise.argument(call, name, s) for name, s in call.shapes.items() if name in EXPERTS}
        replays = [Replay(self.kernels, self.traces[str(call)], s | shared) for s in sets]
        ways = {name: partial(way, **shared) for name, way in baselines(call.op, call.options, call.shapes).items()}
        return replays, ways, statistics.mean(bytes_read(call, s, shared) for s in sets)

    def block(self, call: Call, noise: RandomTensors, sets: list[Args]) -> Work:
        """The router's dispatches, and on their outputs those of the experts."""
        block = Block.random(call.model, noise)
        block.router = {name: tensor.to(call.dtype) for name, tensor in block.router.items()}  # as recorded
        gate, experts = (self.traces[str(part)] for part in parts(call))
        replays, bytes = [], []
        for s in sets:
            first = Replay(self.kernels, gate, {"hidden": s["x"], **block.router})
            first()
            weights, ids = first.outputs
            then = Replay(self.kernels, experts, {"x": s["x"], "weights": weights, "ids": ids, **block.experts})
            replays.append(Chain(first, then))
            bytes.append(moved(s["x"]) + block.other_bytes() + block.bytes_read(ids))
        ways = {name.removeprefix("plain "): way.block for name, way in plain(block).items()}
        return replays, ways, statistics.mean(bytes)

    def agreeing(self, call: Call, replay, ways: dict, theirs: Args, failed: dict[str, str]) -> dict[str, Callable]:
        """PyTorch's ways that compute the same and can be captured in a graph, unlike a loop over experts."""
        one = expert_bytes(call.model, call.dtype)
        ways = {
            name: way
            for name, way in ways.items()
            if name != "eager" and not too_large(name, call.T, call.model.K, one)
        }

        def ours() -> Tensor:
            replay()
            return replay.outputs[0]

        called = {name: lambda way=way: way(**theirs) for name, way in ways.items()}
        agree = device_bench.agreeing(call, {"ours": ours} | called, failed)
        return {name: way for name, way in ways.items() if name in agree}


def bytes_read(call: Call, one_set: Args, shared: Args) -> int:
    """The bytes read; of the experts' weights, only those of the selected experts."""
    if not shared:
        return moved(*one_set.values())
    chosen = one_set["ids"].unique().numel()
    return moved(*one_set.values()) + moved(*shared.values()) * chosen // call.model.E


def times(folder: Path, arguments: list[str]) -> int:
    """Run `python -m torch_moe_metal bench` with these arguments, on the translated shaders."""
    parser = argparse.ArgumentParser(prog="run.py FOLDER --bench")
    bench.add_arguments(parser)
    if not (folder / "bench.json").exists():
        parser.error(f"{folder} has no bench.json: `python tests/gpu/record.py FOLDER` writes it")
    return bench.run(parser.parse_args(arguments), partial(Translated, folder))


class PackedTimes:
    """The rows of packed_rows.py: compared with the reference in float64, and timed in a graph of several inputs."""

    SETS = 16

    def __init__(self, folder: Path):
        recorded = json.loads((folder / "packed.json").read_text())
        self.traces = {trace["case"]: trace for trace in recorded}
        self.kernels, self.limits = Kernels(folder), Limits().gb_per_s

    def row(self, row: Row) -> int:
        generator = torch.Generator("cuda").manual_seed(0)
        copies = 24 if 0 < row.N < 10000 else 2 if row.N else 1  # more than the cache holds
        weights = [row.weights(generator) for _ in range(copies)]
        sets = [row.inputs(generator) | weights[i % copies] for i in range(max(self.SETS, copies))]
        replays = [Replay(self.kernels, self.traces[str(row)], one) for one in sets]
        replays[0]()
        error = self.error(row, sets[0], replays[0].outputs[0])
        graph = captured(lambda: [replay() for replay in replays])
        us = microseconds({"ours": graph}, len(sets))["ours"]
        floor = statistics.mean(row.bytes(one) for one in sets) / self.limits["copy"] / 1e3
        wrong = not error < tolerance(BFLOAT)
        note = "  WRONG" if wrong else ""
        print(f"{row!s:36} {us:8.1f} us  floor {floor:7.1f}  x {us / floor:5.2f}  error {error:.1e}{note}", flush=True)
        return int(wrong)

    @staticmethod
    def error(row: Row, args: Args, got: Tensor) -> float:
        """Error relative to the reference in float64, for a few of the tokens and the experts that they selected."""
        some = slice(None, None, -(-row.T // 16))
        used = {name: t[some] if name in ("x", "weights", "ids") else t for name, t in args.items()}
        args, got = used, got[some]
        if "ids" in args:
            chosen, ids = args["ids"].unique(return_inverse=True)
            used = {name: t[chosen] if name.startswith(("gate_up", "down")) else t for name, t in args.items()}
            used["ids"] = ids
        wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in used.items()}
        want = getattr(reference, row.op)(**wide, **row.options)
        return float((got.double() - want).norm() / want.norm())


def packed_times(folder: Path, wanted: list[str]) -> int:
    times = PackedTimes(folder)
    print(f"{torch.cuda.get_device_name()}: " + ", ".join(f"{k} {v:.0f} GB/s" for k, v in times.limits.items()))
    return max(times.row(row) for row in ROWS if not wanted or row.op in wanted)


class Tuned:
    """Measures the traces for `tune`: a call under some settings is a replay of its dispatches under these settings."""

    def __init__(self, folder: Path, kernels: Kernels | None):
        self.kernels = kernels
        self.traces: dict[str, list[dict]] = {}
        for trace in json.loads((folder / "tune.json").read_text()):
            self.traces.setdefault(trace["case"], []).append(trace)
        all_defaults = [trace["defaults"] for traces in self.traces.values() for trace in traces]
        self.defaults = {name: value for defaults in all_defaults for name, value in defaults.items()}

    def trace(self, call: Call, settings: dict[str, int]) -> int:
        """The index of the call's list of dispatches."""
        traces = self.traces[str(call)]
        wanted = [(self.defaults | settings)[name] for name in traces[0]["defaults"]]
        return next(i for i, trace in enumerate(traces) if wanted in trace["settings"])

    def __call__(self, call: Call, candidates: list[dict[str, int]]) -> list[list[float]]:
        torch.cuda.empty_cache()
        noise = RandomTensors("cuda", call.dtype)
        shared = {name: noise.argument(call, name, s) for name, s in call.shapes.items() if name in EXPERTS}
        sets = [inputs(call, noise) | shared for _ in range(call.sets)]
        wanted = [self.trace(call, settings) for settings in candidates]
        replays = {which: self.replays(self.traces[str(call)][which], sets) for which in set(wanted)}
        graphs = {which: captured(lambda all=all: [replay() for replay in all]) for which, all in replays.items()}
        rounds = rounds_of({str(place): graphs[which] for place, which in enumerate(wanted)}, len(sets))
        return [[us / 1e6 for us in times] for times in rounds.values()]

    def replays(self, trace: dict, sets: list[Args]) -> list[Replay]:
        """Replays keep the memory alive that a graph of them uses."""
        return [Replay(self.kernels, trace, one, poison=False) for one in sets]

    def model(self) -> str:
        return next(name for name in MODELS if any(f"-{name}-" in case for case in self.traces))


def tuned(folder: Path) -> int:
    if not (folder / "tune.json").exists():
        print(f"{folder} has no tune.json: `python tests/gpu/record.py FOLDER --tune` writes it", file=sys.stderr)
        return 2
    measure = Tuned(folder, Kernels(folder))
    name = measure.model()
    settings = [setting for setting in tune.SETTINGS if setting.name in measure.defaults]
    models = {(name, "dense"): MODELS[name]}
    calls = {setting.name: tune.calls_of(setting, models, torch.bfloat16) for setting in settings}
    print(f"{torch.cuda.get_device_name()}, {name}, bf16: translated shaders, no Apple figures", flush=True)
    print(tune.table(tune.search(calls, settings, measure.defaults, measure, fixed={})))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--bench", nargs=argparse.REMAINDER, metavar="...", help="times; the rest are bench's arguments"
    )
    parser.add_argument("--sanitizers", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--all", action="store_true", help="cases, sanitizers, packed formats and times")
    parser.add_argument("--tune", action="store_true", help="the search of `tune`, on what record.py --tune wrote")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--planted-race", action="store_true")
    parser.add_argument("--ops", nargs="+", default=[])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return 0
    if options.all:
        modes = [[], ["--sanitizers"], ["--packed"], ["--bench"]]
        codes = [subprocess.run([sys.executable, __file__, str(options.folder), *mode]).returncode for mode in modes]
        return max(map(abs, codes))
    if options.bench is not None:
        return times(options.folder, options.bench)
    if options.tune:
        return tuned(options.folder)
    if options.packed:
        return packed_times(options.folder, options.ops)
    if options.sanitizers:
        return sanitizers(options.folder)
    kernels = Kernels(options.folder)
    if options.planted_race:
        return planted_race(kernels)
    traces = json.loads((options.folder / "cases.json").read_text())
    if options.ops:
        traces = [trace for trace in traces if trace["case"].split("-")[0] in options.ops]
    if options.smallest:
        return check(kernels, smallest(traces), poison=False)  # to initcheck, poison is an initialised value
    return check(kernels, traces)


if __name__ == "__main__":
    sys.exit(main())
