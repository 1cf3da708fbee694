"""`torch.device("mps")` on Linux, running a project's own Objective-C++ and shaders."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..costs import Costs
from . import build
from .build import Project

_loaded = False


@dataclass(frozen=True)
class Dispatch:
    kernel: str
    label: str  # the pipeline's
    grid: list[int]  # in threadgroups; in threads when exact_threads (dispatchThreads:)
    threads: list[int]  # per threadgroup
    exact_threads: bool
    threadgroup_bytes: int
    buffer_bytes: int  # from each bound offset to the end of its buffer, every buffer once
    constant_bytes: int  # setBytes
    seconds: float  # spent running the kernel
    costs: Costs | None  # with record(costs=True)
    arguments: list[dict]  # index, and either contents (torch.ops.metal_sim.contents of a tensor) and offset, or bytes


@dataclass(frozen=True)
class Compiled:
    """A library made by newLibraryWithSource:."""

    metal_version: int  # 310, 320 or 400
    safe: bool  # maths mode: infinities and NaN are kept, nothing is reordered
    precise: bool  # maths functions
    concurrently: bool  # the device compiles as many at once as it can


@dataclass
class Record:
    dispatches: list[Dispatch] = field(default_factory=list)
    host_syncs: list[str] = field(default_factory=list)  # ops that made the host wait for the device
    commits: int = 0  # how often an op committed its work
    seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """The time outside of kernels, for encoding."""
        return self.seconds - sum(d.seconds for d in self.dispatches)

    @property
    def kernels(self) -> list[str]:
        return [d.kernel for d in self.dispatches]


def load(*projects: Project) -> None:
    """Build what changed, and register the simulated mps device and the ops of these projects. Safe to call again."""
    global _loaded
    build.build(projects)
    if not _loaded:
        torch.ops.load_library(build.SIMULATOR)
        _answer_for_torch()
        set_orders("forward")
        _loaded = True
    for project in projects:
        torch.ops.load_library(project.library)


def _answer_for_torch() -> None:
    """Define the functions of torch's MPS backend that its Python code calls and the Linux wheel lacks."""
    answers = {
        "_has_mps": True,
        "_mps_is_available": lambda: True,
        "_mps_is_in_bad_fork": lambda: False,
        "_mps_is_on_macos_or_newer": lambda major, minor: True,
        "_mps_get_name": lambda: "Simulated Metal device",
        "_mps_get_core_count": lambda: 1,
        "_mps_get_default_generator": lambda: torch.default_generator,
        "_mps_deviceSynchronize": synchronize,
        "_mps_emptyCache": lambda: None,
        "_mps_currentAllocatedMemory": torch.ops.metal_sim.allocated_bytes,
        "_mps_driverAllocatedMemory": torch.ops.metal_sim.allocated_bytes,
        "_mps_recommendedMaxMemory": lambda: 16 << 30,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, answer)
    torch.UntypedStorage.mps = _storage_to_mps
    for cached in (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer):
        cached.cache_clear()


def _storage_to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """For torch.load, because UntypedStorage's own constructor refuses "mps" in the Linux wheel."""
    if storage.device.type == "mps":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to("mps").untyped_storage()


def synchronize() -> None:
    """End the stream's encoder, and raise if guard bytes of a buffer were changed."""
    torch.ops.metal_sim.synchronize()


def _dispatch(costs: dict[str, int] | None, **others) -> Dispatch:
    return Dispatch(costs=costs and Costs.scaled(costs), **others)


@contextmanager
def record(costs: bool = False, sample: int = 0) -> Iterator[Record]:
    """Record dispatches inside the `with`, which must not be nested.

    costs: count what each dispatch does. sample: run only this many threadgroups of a larger dispatch, evenly spread,
    for costs of sizes that are too large to compute; memory that the others would have written keeps its content."""
    result = Record()
    torch.ops.metal_sim.clear()
    torch.ops.metal_sim.set_costs(costs, sample)
    start = time.perf_counter()
    try:
        yield result
    finally:
        result.seconds = time.perf_counter() - start
        torch.ops.metal_sim.set_costs(False, 0)
        counters = _counters()
        result.dispatches += [_dispatch(**fields) for fields in counters["dispatches"]]
        result.host_syncs += counters["host_syncs"]
        result.commits = counters["commits"]


@contextmanager
def host_only() -> Iterator[None]:
    """Check and count dispatches without running kernels, to time the host's side of an op."""
    torch.ops.metal_sim.set_host_only(True)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_host_only(False)


@contextmanager
def playing_macos(major: int, minor: int = 0, *, for_older_sdk: bool = False) -> Iterator[None]:
    """Behave like another macOS: the Metal languages that compile, and the versions of NSProcessInfo and the kernel.

    for_older_sdk: NSProcessInfo reports macOS 26 and newer as 16, as to programs that were linked for an older one."""
    torch.ops.metal_sim.set_macos(major, minor, for_older_sdk)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_macos(26, 0, False)


@contextmanager
def playing_gpu(name: str, family: int) -> Iterator[None]:
    """Behave like another GPU: its name, and its newest Apple family, such as 1007 for M1."""
    torch.ops.metal_sim.set_gpu(name, family)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_gpu("Simulated Metal device", 1008)


@contextmanager
def grouped_mm() -> Iterator[None]:
    """Give mps its own kernel of aten::_grouped_mm, as from torch 2.15 on. Rows in no group are NaN in its result."""
    torch.ops.metal_sim.set_grouped_mm(True)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_grouped_mm(False)


@contextmanager
def failing_commits(what: str) -> Iterator[None]:
    """Committed command buffers end with an error of that description, as if macOS had aborted them.

    Their kernels have run nevertheless, when they were dispatched."""
    torch.ops.metal_sim.set_commit_error(what)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_commit_error("")


@contextmanager
def more_threadgroups(count: int = 1) -> Iterator[None]:
    """Add threadgroups along x to every dispatch; kernels must ignore them."""
    torch.ops.metal_sim.set_more_threadgroups(count)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_more_threadgroups(0)


@contextmanager
def new_command_buffers() -> Iterator[None]:
    """The stream makes a new command buffer after each commit, as in PyTorch without commitAndContinue (signposts or a
    capture)."""
    torch.ops.metal_sim.set_flushes(True)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_flushes(False)


@contextmanager
def recording_encoders() -> Iterator[None]:
    """Ops get a proxy of the encoder, as in a capture by PyTorch. It forwards other calls, but an op that encodes by
    a call that it does not record raises."""
    torch.ops.metal_sim.clear()
    torch.ops.metal_sim.set_records(True)
    try:
        yield
    finally:
        torch.ops.metal_sim.clear()
        torch.ops.metal_sim.set_records(False)


@contextmanager
def concurrent_encoders() -> Iterator[None]:
    """Encoders order dispatches only by barriers, like MTLDispatchTypeConcurrent."""
    torch.ops.metal_sim.clear()
    torch.ops.metal_sim.set_concurrent(True)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_concurrent(False)


@contextmanager
def last_threadgroups(count: int) -> Iterator[None]:
    """Run only the last threadgroups along x of every dispatch, to test the end of tensors too large to compute."""
    torch.ops.metal_sim.set_last_threadgroups(count)
    try:
        yield
    finally:
        torch.ops.metal_sim.set_last_threadgroups(0)


def set_orders(*names: str) -> None:
    """Run every dispatch once in each of these thread orders, which must agree: forward, backward, random:SEED.

    METAL_SIM_ORDERS overrides this, so that a violation can be repeated in one order."""
    torch.ops.metal_sim.set_orders(list(names))
    if stated := os.environ.get("METAL_SIM_ORDERS"):
        torch.ops.metal_sim.set_orders(stated.split(","))


def live_objects() -> dict[str, int]:
    """Metal objects made and not yet released, by protocol or class; PyTorch's own buffers count as "tensor"."""
    return _counters()["live_objects"]


def made_objects() -> dict[str, int]:
    """Metal objects made so far."""
    return _counters()["made_objects"]


def compiled() -> list[Compiled]:
    """The compile options of each library so far."""
    return [Compiled(**fields) for fields in _counters()["compiled"]]


def _counters() -> dict:
    return json.loads(torch.ops.metal_sim.counters())
