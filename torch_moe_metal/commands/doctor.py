"""`python -m torch_moe_metal doctor`: versions, devices, and a test of every op."""

import importlib.metadata
import itertools
import os
import platform
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import __version__, arguments, cpu_isa, macos, reference
from ..formats import FORMATS
from ..transformers_support import why_unsupported
from .bench import measure
from .bench.random_weights import Packing
from .common.devices import devices
from .common.progress import Progress

DIMS = {"E": 33, "K": 3, "H": 96, "I": 40, "N": 37, "U": 1}  # odd sizes: most faults of kernels are in tails
DIMS |= {"B": 2, "A": 6, "J": 2, "S": 101, "D": 40, "V": 24, "R": 8, "W": 4, "L": 4}
BITS = 4  # of affine weights
TOKENS = (5, 50)  # decoding, and a prompt, which has its own kernels


#: One format of each family of readers; the others differ only in constants.
PACKED = ("affine", "mxfp4", "fp8", "mxfp8", "nvfp4", "q4_0", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs")


def formats(op: str) -> tuple[str, ...]:
    return ("dense", *PACKED) if arguments.takes_formats(op) else ("dense",)


def sample_arguments(op: str, dtype: torch.dtype, tokens: int, format: str = "dense") -> dict[str, Tensor]:
    """Small arguments for one op, including optional ones, the same on every device. Parameters are float32."""
    dims = DIMS | {"T": tokens}
    if format != "dense":
        whole = FORMATS[format].whole_columns
        # Few experts, because unpacking them for the reference takes most of the time.
        dims |= {"E": 5, "H": -(-DIMS["H"] // whole) * whole, "I": max(64, whole)}
    random = torch.Generator().manual_seed(0)
    table = arguments.ARGUMENTS[op]
    shapes = arguments.shapes(op, arguments.optional_arguments(op))
    drawn = {name: arguments.draw(op, name, arguments.size(s, dims), dims, random) for name, s in shapes.items()}
    if format != "dense":
        packing = Packing(format, BITS, 32)
        drawn = arguments.pack(op, drawn, lambda _, weight: packing.of(weight, random))
    converted = ("activation", "weight") if format == "dense" else ("activation",)
    return {name: t.to(dtype) if table[name].kind in converted else t for name, t in drawn.items()}


def unpacked(experts: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    """The same arguments of `experts` with dense weights. The reference would unpack the experts of each token anew."""
    found = dict(experts)
    for name in arguments.weights("experts"):
        parts = [found.pop(part, None) for part in (name, *arguments.scale_names(name))]
        found[name] = reference.dequantize(*parts, format=format, bits=BITS, dtype=torch.float64)
    return found


def check(op: str, device: str, dtype: torch.dtype, tokens: int, format: str = "dense") -> str | None:
    """Compares the op with the reference in float64. Returns None, or a description of the error."""
    try:
        given = {name: tensor.to(device) for name, tensor in sample_arguments(op, dtype, tokens, format).items()}
        exact = {name: t.cpu().double() if t.is_floating_point() else t.cpu() for name, t in given.items()}
        options = arguments.options(
            op, {"top_k": DIMS["K"], "format": format, "dtype": dtype, "causal": True, "replay": 1}
        )
        with torch.no_grad():
            got = arguments.results(op, getattr(torch.ops.moe_metal, op)(**given, **options), given)
            if op == "experts" and format != "dense":
                exact, options = unpacked(exact, format), options | {"format": "dense"}
            want = arguments.results(op, getattr(reference, op)(**exact, **options), exact)
    except Exception as error:  # any error: the report must go on
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for index, (g, w) in enumerate(zip((tensor.cpu() for tensor in got), want, strict=True)):
        if not g.is_floating_point():
            if not torch.equal(g, w):
                return f"output {index}: wrong expert ids"
            continue
        error, allowed = ((g.double() - w.double()).norm() / w.double().norm()).item(), reference.tolerance(g.dtype)
        if not error <= allowed:
            return f"output {index}: relative error {error:.1e}, allowed {allowed:.0e}"
    return None


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def subnormal_halves(device: str) -> str | None:
    """None if the GPU has subnormal halves, which decoders of packed weights use (shaders/weights.h)."""
    codes, scale = torch.full((1, 16), 0x11, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8)
    got = torch.ops.moe_metal.dequantize(codes.to(device), scale.to(device), format="mxfp4", dtype=torch.float32)
    if (got.cpu() == 0.5).all():
        return None
    return f"half subnormals are flushed on this GPU, so packed weights are wrong: expected 0.5, got {got[0, 0].item()}"


def compiling(device: str) -> Iterator[str]:
    """The time that Metal has spent on compiling libraries of shaders, by file. Without `warm_up` the first calls wait
    for it."""
    took: dict[str, list[tuple[float, str]]] = {}
    for library, seconds in zip(*torch.ops.moe_metal._compile_times(), strict=True) if device == "mps" else ():
        shader, _, macros = library.partition(" ")
        took.setdefault(shader, []).append((seconds, re.sub(r" MOE_METAL_PART_\w+=1|MOE_METAL_", "", macros).lower()))
    if took:
        total = sum(seconds for libraries in took.values() for seconds, _ in libraries)
        yield f"libraries of shaders, compiled by Metal: {total:.1f} s (macOS caches them, so later runs are faster)"
    for shader, libraries in sorted(took.items()):
        mean, (longest, which) = sum(seconds for seconds, _ in libraries) / len(libraries), max(libraries)
        yield f"  {shader:28} {len(libraries):3}, {mean:.2f} s each, at most {longest:.2f} s: {which}"


def advice() -> Iterator[str]:
    """What is not as it should be on this machine."""
    version = installed("transformers")
    if version != "not installed" and (reason := why_unsupported(version)) is not None:
        yield reason
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    idle, threads = max(cores - os.getloadavg()[0], 0), torch.get_num_threads()
    if idle < 0.75 * threads:
        yield (
            f"{threads} threads, but only {idle:.1f} of {cores} cores were idle in the last minute. Every op waits for "
            "its slowest thread: close other programs, or set OMP_NUM_THREADS"
        )


def wrong_results(op: str, device: str, progress: Progress) -> dict[str, str]:
    """The errors of an op, by case."""
    wrong = {}
    for format, tokens, dtype in itertools.product(formats(op), TOKENS, reference.TOLERANCES):
        case = f"{str(dtype).removeprefix('torch.')}{'' if format == 'dense' else f' {format}'}, T = {tokens}"
        progress.next(f"{device}: {op}, {case}")
        if problem := check(op, device, dtype, tokens, format):
            wrong[case] = problem
    progress.clear()
    return wrong


def run() -> int:
    """Print the report. Returns 0 if every op is correct on every available device, and `patch` accepts the installed
    torch, else 1."""
    print(f"torch_moe_metal {__version__}   torch {torch.__version__}   transformers {installed('transformers')}")
    print(f"Python {platform.python_version()}   {measure.system()}   {measure.processor()}")
    print(f"CPU kernels: {cpu_isa}, {torch.get_num_threads()} threads")
    if too_old := macos.why_torch_is_too_old():
        print(f"\n{too_old}")
    for line in advice():
        print(f"warning: {line}")
    failures, cases = 0, sum(map(len, map(formats, arguments.ARGUMENTS))) * len(TOKENS) * len(reference.TOLERANCES)
    for device, missing in devices():
        if missing:
            print(f"\n{device}: not available: {missing}")
            continue
        print(f"\n{device}: every op against the float64 reference", flush=True)
        progress = Progress(cases, wanted=True)
        for op in arguments.ARGUMENTS:
            wrong = wrong_results(op, device, progress)
            found = (f"\n      {case}: {problem}" for case, problem in wrong.items())
            print(f"  {op:28} {'ok' if not wrong else 'FAILED'}", *found, flush=True)
            failures += bool(wrong)
        if flushed := subnormal_halves(device):
            print(f"  {flushed}")
            failures += 1
        for line in compiling(device):
            print(line)
    if failures:
        print(
            f"\n{failures} failed. Rebuild for the installed torch (`pip install --no-build-isolation "
            "--force-reinstall --no-deps .`) and try again; if it still fails, please report it with this output."
        )
    return 1 if failures or too_old else 0
