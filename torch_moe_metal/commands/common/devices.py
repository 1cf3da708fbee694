"""The devices of this machine, why the ops cannot run on one of them, and their free memory."""

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import torch

from ...macos import why_torch_is_too_old
from .cli import CannotRun


def add_device(parser: ArgumentParser) -> None:
    best = "mps" if torch.backends.mps.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "mps"), default=best, help=f"default here: {best}")


def check_device(device: str) -> None:
    """Raise `CannotRun` if this device is missing, or if this Mac needs a newer torch, for whichever device."""
    if (reason := why_torch_is_too_old()) is not None:
        raise CannotRun(reason)
    if device == "mps" and not torch.backends.mps.is_available():
        raise CannotRun(f"--device mps: {dict(devices())['mps']}")


def has_kernel(device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("moe_metal::gate", device.upper())


def why_no_sum() -> str | None:
    """The error of a sum on mps, if there is one. The GPU of a virtual Mac may be reported as available but have no
    memory."""
    try:
        torch.ones(2, device="mps").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def why_not_ours() -> str | None:
    """The features that our kernels miss on an Apple GPU, such as that of a virtual Mac."""
    try:
        torch.ops.moe_metal._check_device()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def devices() -> Iterator[tuple[str, str | None]]:
    """Each device and, if the ops cannot run on it, the reason."""
    yield "cpu", None
    if not torch.backends.mps.is_built():
        yield "mps", "this PyTorch is built without MPS; on a Mac with Apple silicon, install torch from PyPI"
    elif not torch.backends.mps.is_available():
        yield "mps", "PyTorch finds no usable Apple GPU; macOS 14 or newer on Apple silicon is needed"
    elif not has_kernel("mps"):
        yield "mps", "the package was built without its MPS backend; reinstall it on this Mac"
    elif problem := why_no_sum():
        yield "mps", f"PyTorch finds an Apple GPU, but cannot compute on it: {problem}"
    elif problem := why_not_ours():
        yield "mps", problem
    else:
        yield "mps", None


def free_memory(device: str) -> int:
    """Bytes that can safely be allocated on the device."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = free_host_memory()
    if device == "mps" and torch.backends.mps.is_built():  # part of the host's memory, limited by Metal
        free = min(free, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return free


def free_host_memory() -> int:
    """Seven eighths of the available memory on Linux, within the container's limit; elsewhere three quarters of all."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    (free,) = (int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int((group / "memory.current").read_text()))
    return free * 7 // 8
