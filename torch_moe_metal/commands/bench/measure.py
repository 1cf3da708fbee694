"""Times, the memory bandwidth of the machine, and what is recorded with them."""

import ctypes
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ... import macos

PROBED = 256 << 20  # bytes that a probe reads or copies
CPU_TURN, GPU_TURN = 1e-3, 20e-3  # minimum seconds of a turn, long enough that synchronising a GPU does not matter


def synchronize(device: str) -> None:
    """Wait for the device, and for MLX if it is used."""
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].synchronize()


def seconds_each(functions: dict[str, Callable[[], object]], device: str, seconds: float) -> dict[str, float]:
    """The median time of one call of each, over `rounds_each`."""
    return {name: statistics.median(times) for name, times in rounds_each(functions, device, seconds).items()}


def rounds_each(functions: dict[str, Callable[[], object]], device: str, seconds: float) -> dict[str, list[float]]:
    """The time of one call of each function in every round. They take turns, so that a slow phase of the machine
    affects all of them, for about `seconds`: at least 7 rounds, or 3 if those take ten times as long."""

    def measure(function: Callable[[], object], calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return time.perf_counter() - start

    turn = CPU_TURN if device == "cpu" else GPU_TURN
    calls = {}
    for name, function in functions.items():
        measure(function, 1)  # warm up
        calls[name] = 1
        while measure(function, calls[name]) < min(turn, seconds) / 2 and calls[name] < 1000:
            calls[name] *= 2
    samples: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()

    def enough(rounds: int) -> bool:
        elapsed = time.perf_counter() - start
        return elapsed >= seconds and (rounds >= 7 or (rounds >= 3 and elapsed >= 10 * seconds))

    rounds = 0
    while not enough(rounds):
        rounds += 1
        for name, function in functions.items():
            samples[name].append(measure(function, calls[name]) / calls[name])
    return samples


# ------------------------------------------------------------------------------------------------ bandwidth


def copies(device: str, bytes: int = PROBED) -> dict[str, Callable[[], object]]:
    """PyTorch ops that copy a tensor. They move twice its bytes."""
    source = torch.ones(bytes // 4, device=device)
    target = torch.zeros_like(source)
    return {
        "copy_": lambda: target.copy_(source),
        "add": lambda: torch.add(source, 0, out=target),
        "mul": lambda: torch.mul(source, 1, out=target),
    }


def reads(device: str, bytes: int = PROBED) -> dict[str, Callable[[], object]]:
    """PyTorch ops that read a tensor once, on all cores. The fastest one depends on the machine."""
    floats = torch.ones(bytes // 4, device=device)
    whole = floats.view(torch.int32).view(torch.int64)
    matrix = floats.view(-1, 4096)
    vector = floats[:4096]
    return {
        "sum": floats.sum,
        "sum of int64": whole.sum,
        "amax": floats.amax,
        "mv": lambda: torch.mv(matrix, vector),
    }


class Limits:
    """The fastest ops that read and copy, found once. They are measured again with each row."""

    when = "in turn with the row"

    def __init__(self, device: str, seconds: float, bytes: int = PROBED):
        self.probes: dict[str, Callable[[], object]] = {}
        self.names: dict[str, str] = {}
        self.moved = {"read": bytes, "copy": 2 * bytes}
        self.gb_per_s: dict[str, float] = {}
        for limit, ways in (("read", reads(device, bytes)), ("copy", copies(device, bytes))):
            ways = {name: way for name, way in ways.items() if works(way)}
            times = seconds_each(ways, device, seconds)
            self.names[limit] = fastest = min(times, key=times.__getitem__)
            self.probes[limit] = ways[fastest]
            self.gb_per_s[limit] = self.moved[limit] / times[fastest] / 1e9


def works(function: Callable[[], object]) -> bool:
    """Whether the device supports this op of PyTorch."""
    try:
        function()
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ memory


def keep_freed_memory() -> bool:
    """Make freed memory keep its pages, as with jemalloc and tcmalloc. Returns False without glibc.

    glibc returns large blocks to Linux, so every new output causes page faults, which can take longer than computing
    its values, and which vary from run to run."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    trim_threshold, mmap_max = -1, -4  # malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


# ------------------------------------------------------------------------------------------------ the machine


def machine() -> dict[str, object]:
    """What is recorded with figures: machine, date and command."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    program, checkout = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[3]
    name = program.relative_to(checkout) if program.is_relative_to(checkout) else program.name
    command = ["-m", program.parent.name] if program.name == "__main__.py" else [str(name)]
    return {
        "command": shlex.join(["python", *command, *sys.argv[1:]]),
        **commit(checkout),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": system(),
    }


def commit(checkout: Path) -> dict[str, str]:
    """The commit of a checkout, with "-dirty" if files were changed; empty outside of a checkout."""
    if not (checkout / ".git").exists():
        return {}
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return {"commit": subprocess.run(command, capture_output=True, text=True).stdout.strip()}


def system() -> str:
    if version := macos.version():
        return f"macOS {version}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def processor() -> str:
    """The model name of the processor."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or platform.machine()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.machine()
