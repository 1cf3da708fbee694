"""A folder with prefixes, which outlive the process: a restarted server does not compute them again.

A thread writes a conversation after it was not used for a few seconds, when it leaves the memory, and at the end. A
file has a temporary name until it is complete. Those of all models count for the limit, and the ones that were not used
for the longest time are deleted.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from ...transformers.fusing.snapshots import rows_of
from .cli import reason_of
from .loading import say
from .prefix_file import Rows, named, read, read_ids, write
from .prefixes import SHORTEST, Prefix, contains

SUFFIX = ".prefix.safetensors"
UNFINISHED = ".prefix.tmp"
QUIET = 3.0  # seconds without use


@dataclass(eq=False)
class Job:
    """A conversation that is to be written: views of its cache, which are right until it goes on."""

    prefix: Prefix
    copy: Prefix
    rows: Rows
    due: float
    void: bool = False


class GoneOn(Exception):
    """The conversation went on while it was written."""


class PrefixFolder:
    """Its methods may be called on any thread."""

    def __init__(self, folder: Path, limit: float, key: str):
        """`limit` in bytes. `key` is a hash of what a cache depends on."""
        self.folder, self.limit, self.key = folder, limit, key
        self.turns: AbstractContextManager = nullcontext()  # held while a tensor is copied from a device
        self.files: dict[Path, Prefix] = {}  # without their caches
        self.jobs: dict[Prefix, Job] = {}
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="prefixes", daemon=True)
        with contextlib.suppress(OSError):
            self.clean()
        for path in sorted(self.folder.glob(f"{key[:16]}-*{SUFFIX}"), key=last_used):
            with self.reading(path):
                self.files[path] = read_ids(path, key)
        self.thread.start()

    def clean(self) -> None:
        """Delete what a process left that was killed: one that still writes holds the lock of its file."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            with open(path, "rb") as file, contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Delete a file that cannot be read, with one line."""
        try:
            yield
        except FileNotFoundError:  # another server has deleted it
            self.files.pop(path, None)
        except Exception as error:  # safetensors has a class of its own, and json, and Python
            say(f"--prefix-cache: deleted {path}, which is damaged: {reason_of(error)}")
            self.remove(path)

    def remove(self, path: Path) -> None:
        with self.changed, contextlib.suppress(OSError):
            self.files.pop(path, None)
            path.unlink()

    # ------------------------------------------------------------------------------------------------ reading

    def find(self, ids: list[int], known: int, new: Callable[[], DynamicCache], device: torch.device) -> Prefix | None:
        """The prefix that reaches farthest, if that is farther than the `known` tokens."""
        with self.changed:
            by_reach = sorted(((each.reach(ids), path) for path, each in self.files.items()), reverse=True)
        for length, path in by_reach:
            if length < SHORTEST or length <= known:
                break
            with self.reading(path):
                found = read(path, self.key, new(), device)
                os.utime(path)
                found.path = path
                return found
        return None

    # ------------------------------------------------------------------------------------------------ writing

    def keep(self, prefix: Prefix) -> None:
        """Write this prefix after some seconds, unless it goes on before."""
        copy = replace(prefix, cache=None, snapshots=dict(prefix.snapshots))
        with self.changed:
            rows = rows_of(prefix.cache, len(prefix.ids))
            self.jobs[prefix] = Job(prefix, copy, rows, time.monotonic() + QUIET)
            self.changed.notify_all()

    def goes_on(self, prefix: Prefix) -> None:
        """Its cache is about to change."""
        with self.changed:
            if (job := self.jobs.pop(prefix, None)) is not None:
                job.void = True
                self.changed.notify_all()

    def leaves(self, prefix: Prefix) -> None:
        """It has left the memory, so write it now, if it is not written."""
        with self.changed:
            if (job := self.jobs.get(prefix)) is not None:
                job.due = 0.0
                self.changed.notify_all()

    def settle(self) -> None:
        """Wait until those that left the memory are written. The caller must not hold the device's turn."""
        with self.changed:
            self.changed.wait_for(lambda: all(job.due for job in self.jobs.values()) or not self.thread.is_alive())

    def close(self) -> None:
        """Write the rest."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join()

    def run(self) -> None:
        while (job := self.next_job()) is not None:
            try:
                self.write(job)
            except GoneOn:
                pass
            except Exception as error:  # a full disk, for instance
                say(f"--prefix-cache: cannot write to {self.folder}: {reason_of(error)}")
            with self.changed:
                if self.jobs.get(job.prefix) is job:
                    del self.jobs[job.prefix]
                self.changed.notify_all()

    def next_job(self) -> Job | None:
        """The one that is due; None at the end."""
        with self.changed:
            while True:
                job = min(self.jobs.values(), key=lambda each: each.due, default=None)
                if job is None and self.closed:
                    return None
                wait = None if job is None else job.due - time.monotonic()
                if wait is not None and (wait <= 0 or self.closed):
                    return job
                self.changed.wait(wait)

    def write(self, job: Job) -> None:
        name = hashlib.sha256(json.dumps([self.key, job.copy.ids]).encode()).hexdigest()[:32]
        path = self.folder / f"{self.key[:16]}-{name}{SUFFIX}"
        size = sum(tensor.nbytes for tensor in named(job.copy, job.rows).values())
        if size > self.limit:
            return

        def to_cpu(tensor: Tensor) -> Tensor:
            if job.void:
                raise GoneOn
            with nullcontext() if tensor.device.type == "cpu" else self.turns:
                return tensor.cpu()

        handle, temporary = tempfile.mkstemp(UNFINISHED, dir=self.folder)
        try:
            with open(handle, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                write(file, job.copy, job.rows, self.key, to_cpu)
                file.flush()
                os.fsync(file.fileno())
                self.publish(job, Path(temporary), path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def publish(self, job: Job, temporary: Path, path: Path) -> None:
        """Give a complete file its name, and delete those that it replaces, or that exceed the limit."""
        with self.changed:
            if job.void:
                raise GoneOn
            os.replace(temporary, path)
            before, job.prefix.path = job.prefix.path, path
            new = replace(job.copy, snapshots=dict.fromkeys(job.copy.snapshots))
            old = [each for each, stored in self.files.items() if each == before or contains(new, stored)]
            for each in {*old} - {path}:
                self.remove(each)
            self.files[path] = new
            sizes = {each: size_of(each) for each in sorted(self.folder.glob(f"*{SUFFIX}"), key=last_used)}
            total = sum(sizes.values())
            for each, size in sizes.items():
                if total <= self.limit:
                    break
                self.remove(each)
                total -= size


def last_used(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def size_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
