"""`python -m torch_moe_metal doctor`: versions, devices, and a test of every op."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

import torch

from .. import __version__, arguments, cpu_isa, macos, reference
from ..torch_checks import wrong_operations
from ..transformers_support import why_unsupported
from .bench import measure
from .bench.samples import never_ran, problem, samples_of
from .common import mapped_file
from .common.devices import devices
from .common.progress import Progress


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


def unused(device: str) -> Iterator[str]:
    """The functions of the shaders that no sample has run. Nothing is known about them on this GPU."""
    found = never_ran() if device == "mps" else []
    if found:
        yield "functions of the shaders that never ran (those of the matrix units need macOS 26.3):"
    yield from (f"  {name}" for name in found)


def wrong_results(op: str, device: str, progress: Progress) -> dict[str, str]:
    """The errors of an op, by case."""
    wrong = {}
    for sample in samples_of(op):
        for dtype in reference.TOLERANCES:
            case = f"{str(dtype).removeprefix('torch.')}{sample}"
            progress.next(f"{device}: {op}, {case}")
            if found := problem(sample, device, dtype):
                wrong[case] = found
    progress.clear()
    return wrong


def wrong_on(device: str, progress: Progress) -> int:
    """Print what is right and wrong on a device. Returns the number of failures."""
    failures = 0
    for op in arguments.ARGUMENTS:
        wrong = wrong_results(op, device, progress)
        found = (f"\n      {case}: {problem}" for case, problem in wrong.items())
        print(f"  {op:28} {'ok' if not wrong else 'FAILED'}", *found, flush=True)
        failures += bool(wrong)
    if flushed := subnormal_halves(device):
        print(f"  {flushed}")
        failures += 1
    if device == "mps" and (wrong_in_torch := wrong_operations(device)):
        print(f"  PyTorch {torch.__version__} is wrong here:", *wrong_in_torch, sep="\n      ")
        failures += 1
    if device == "mps":
        right, line = mapped_file.report()
        print(f"  {line}")
        failures += not right
    for line in (*compiling(device), *unused(device)):
        print(line)
    return failures


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
    failures, cases = 0, sum(map(len, map(samples_of, arguments.ARGUMENTS))) * len(reference.TOLERANCES)
    for device, missing in devices():
        if missing:
            print(f"\n{device}: not available: {missing}")
            continue
        print(f"\n{device}: every op against the float64 reference", flush=True)
        failures += wrong_on(device, Progress(cases, wanted=True))
    if failures:
        print(
            f"\n{failures} failed. Rebuild for the installed torch (`pip install --no-build-isolation "
            "--force-reinstall --no-deps .`) and try again; if it still fails, please report it with this output."
        )
    return 1 if failures or too_old else 0
