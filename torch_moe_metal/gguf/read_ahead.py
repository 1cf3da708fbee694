"""Reads the chosen experts ahead on the CPU, if a model in the pages of files is larger than the memory that is left
(csrc/cpu/read_ahead.h). Nothing changes for models that fit."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .. import huge_pages
from . import GgufFile

GROUPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def for_experts(weights: Iterable[Tensor], file: GgufFile) -> bool:
    """Read experts of these weights ahead if the file is larger than the memory that is left. Returns whether it is."""
    if sum(stamp.size for stamp in file.stamps) <= memory_left():
        return False
    for pages in {tensor.pages.data_ptr(): tensor.pages for tensor in file.tensors.values()}.values():
        huge_pages.not_for_file(pages)  # reading ahead is slower with them (0.7 instead of 1.2 GB/s)
    for weight in weights:
        torch.ops.moe_metal._read_experts_ahead(weight)
    return True


def memory_left() -> int:
    """Bytes that this process can use: what is free, and what the system keeps of files."""
    return min([of_machine(), *of_groups()])


def of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def of_groups() -> Iterator[int]:
    """What the limits of Linux's control groups leave, of both versions: those of the process's group and of the groups
    around it."""
    for line in GROUPS.read_text().splitlines() if GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            home = ROOT / controllers
            inner = home / path.lstrip("/")
            for group in (inner, *inner.parents):
                yield from left_in(group, "max" if controllers == "" else "limit_in_bytes")
                if group == home:
                    break


def left_in(group: Path, limit: str) -> Iterator[int]:
    used = "current" if limit == "max" else "usage_in_bytes"
    try:
        most = (group / f"memory.{limit}").read_text().strip()
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        now = int((group / f"memory.{used}").read_text())
    except (OSError, ValueError):
        return
    if most != "max":
        of_files = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        yield int(most) - now + of_files
