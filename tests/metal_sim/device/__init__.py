"""`torch.device("mps")` on Linux, running a project's own Objective-C++ and shaders."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
    blocks: int = 0  # on the stream's queue, by dispatch_sync; on a Mac each op of PyTorch takes at least one, too
    messages: int = 0  # to encoders
    aten_ops: int = 0  # PyTorch's own ops that ran on the device; copies, but no views
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
        "_mps_driverAllocatedMemory": torch.ops.metal_sim.driver_bytes,
        "_mps_recommendedMaxMemory": torch.ops.metal_sim.working_set,
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
        for name in ("commits", "blocks", "messages", "aten_ops"):
            setattr(result, name, counters[name])


@contextmanager
def _setting(name: str, *values: object, normal: tuple, clears: bool = False) -> Iterator[None]:
    """Change a setting of the simulator, and reset it to `normal` afterwards. `clears`: end the stream's encoder before
    and after, since it keeps the settings that it was made with."""
    set_values = getattr(torch.ops.metal_sim, f"set_{name}")
    try:
        if clears:
            torch.ops.metal_sim.clear()
        set_values(*values)
        yield
    finally:
        if clears:
            torch.ops.metal_sim.clear()
        set_values(*normal)


def host_only() -> AbstractContextManager[None]:
    """Check and count dispatches without running kernels, to time the host's side of an op."""
    return _setting("host_only", True, normal=(False,))


def playing_macos(major: int, minor: int = 0, *, for_older_sdk: bool = False) -> AbstractContextManager[None]:
    """Behave like another macOS: the Metal languages that compile, and the versions of NSProcessInfo and the kernel.

    for_older_sdk: NSProcessInfo reports macOS 26 and newer as 16, as to programs that were linked for an older one."""
    return _setting("macos", major, minor, for_older_sdk, normal=(26, 0, False))


def playing_gpu(name: str, family: int) -> AbstractContextManager[None]:
    """Behave like another GPU: its name, and its newest Apple family, such as 1007 for M1."""
    return _setting("gpu", name, family, normal=("Simulated Metal device", 1008))


def playing_memory(
    max_buffer: int = 9 << 30, working_set: int = 16 << 30, local_volumes: bool = True, takes_pages: bool = True
) -> AbstractContextManager[None]:
    """Other limits of the device, in bytes. Without `local_volumes` all files are on volumes of a network; without
    `takes_pages`, newBufferWithBytesNoCopy returns nil."""
    normal = (9 << 30, 16 << 30, True, True)
    return _setting("memory", max_buffer, working_set, local_volumes, takes_pages, normal=normal)


def failing_commits(what: str) -> AbstractContextManager[None]:
    """Committed command buffers end with an error of that description, as if macOS had aborted them.

    Their kernels have run nevertheless, when they were dispatched."""
    return _setting("commit_error", what, normal=("",))


def more_threadgroups(count: int = 1) -> AbstractContextManager[None]:
    """Add threadgroups along x to every dispatch; kernels must ignore them."""
    return _setting("more_threadgroups", count, normal=(0,))


def new_command_buffers() -> AbstractContextManager[None]:
    """The stream makes a new command buffer after each commit, as in PyTorch without commitAndContinue (signposts or a
    capture)."""
    return _setting("flushes", True, normal=(False,))


def recording_encoders() -> AbstractContextManager[None]:
    """Ops get a proxy of the encoder, as in a capture by PyTorch. It forwards other calls, but an op that encodes by
    a call that it does not record raises."""
    return _setting("records", True, normal=(False,), clears=True)


def concurrent_encoders() -> AbstractContextManager[None]:
    """Encoders order dispatches only by barriers, like MTLDispatchTypeConcurrent."""
    return _setting("concurrent", True, normal=(False,), clears=True)


def last_threadgroups(count: int) -> AbstractContextManager[None]:
    """Run only the last threadgroups along x of every dispatch, to test the end of tensors too large to compute."""
    return _setting("last_threadgroups", count, normal=(0,))


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
