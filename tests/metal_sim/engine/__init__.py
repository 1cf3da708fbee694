"""The engine for Python, with numpy arrays as buffers. It needs neither PyTorch nor the simulated device."""

import ctypes
import json
import os
import subprocess
from pathlib import Path

import numpy as np

from ..costs import Costs
from .translate import find_compiler

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
SOURCES = ["engine.cpp", "library.cpp", "scheduler.cpp", "harness.cpp"]
SLOTS = 31
FORWARD, BACKWARD = (0, 0), (1, 0)


def random_order(seed):
    return (2, seed)


class Violation(RuntimeError):
    def __init__(self, rule, message):
        super().__init__(message)
        self.rule = rule


class CompileError(RuntimeError):
    pass


class _Argument(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("offset", ctypes.c_size_t),
    ]


def build():
    """Compile the harness if one of its sources is newer, and return its path."""
    BUILD.mkdir(exist_ok=True)
    library = BUILD / "libengine_harness.so"
    sources = [HERE / name for name in SOURCES]
    headers = [HERE / "engine.h", HERE / "scheduler.h", HERE / "shim" / "abi.h"]
    newest = max(path.stat().st_mtime for path in [*sources, *headers])
    if library.exists() and library.stat().st_mtime >= newest:
        return library
    part = library.with_suffix(f".{os.getpid()}.part")
    flags = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra"]
    command = [find_compiler(), *flags, "-o", part, *sources, "-ldl"]
    subprocess.run(command, check=True)
    part.rename(library)
    return library


def _load():
    library = ctypes.CDLL(str(build()))
    for name in ("rule", "message", "names", "parameters", "costs"):
        getattr(library, f"harness_{name}").restype = ctypes.c_char_p
    library.harness_find.restype = ctypes.c_void_p
    library.harness_static_bytes.restype = ctypes.c_size_t
    return library


_library = None


def harness():
    global _library
    if _library is None:
        _library = _load()
    return _library


def _check(status):
    if not status:
        return
    message = harness().harness_message().decode(errors="replace")
    if status == 1:
        raise CompileError(message)
    if status == 2:
        raise Violation(harness().harness_rule().decode(), message)
    raise RuntimeError(message)


def set_orders(*orders):
    kinds = (ctypes.c_uint32 * len(orders))(*(kind for kind, _ in orders))
    seeds = (ctypes.c_uint64 * len(orders))(*(seed for _, seed in orders))
    harness().harness_set_orders(kinds, seeds, ctypes.c_size_t(len(orders)))


def set_seconds(seconds):
    harness().harness_set_seconds(ctypes.c_double(seconds))


def set_races(on):
    harness().harness_set_races(int(on))


def set_costs(on, sample=0):
    """Whether kernels count and return their Costs. sample: run at most this many threadgroups per dispatch; 0: all."""
    harness().harness_set_costs(int(on), ctypes.c_size_t(sample))


class At:
    """A numpy array bound at a byte offset."""

    def __init__(self, array, offset):
        self.array, self.offset = array, offset


class Bytes:
    """Bytes bound by setBytes."""

    def __init__(self, *values):
        self.data = b"".join(v.tobytes() if isinstance(v, (np.ndarray, np.generic)) else bytes(v) for v in values)


def _literal(value):
    return str(bool(value)).lower() if isinstance(value, (bool, np.bool_)) else repr(np.asarray(value).item())


class Library:
    def __init__(self, source, version=310, constants=None):
        """constants: the values of function constants by index."""
        self.handle = ctypes.c_void_p()
        macros = "".join(
            f"MSL_FUNCTION_CONSTANT_{index}={_literal(value)}\n" for index, value in (constants or {}).items()
        )
        text = source.encode("utf-8", "surrogateescape")
        _check(harness().harness_compile(text, version, macros.encode(), ctypes.byref(self.handle)))

    def names(self):
        return harness().harness_names(self.handle).decode().split()

    def kernel(self, name):
        found = harness().harness_find(self.handle, name.encode())
        if not found:
            raise KeyError(f"no kernel {name!r}; there are {self.names()}")
        return Kernel(self, found)


class Kernel:
    def __init__(self, library, handle):
        self.library, self.handle = library, ctypes.c_void_p(handle)

    def parameters(self):
        lines = harness().harness_parameters(self.handle).decode().splitlines()
        return [line.split() for line in lines]

    def static_bytes(self):
        return harness().harness_static_bytes(self.handle)

    def __call__(self, *arguments, grid, threads, lengths=None, exact=False):
        """arguments: an array, At, Bytes or None for each buffer index; lengths: threadgroup bytes by index.

        Returns its Costs, or None while set_costs() is off."""
        slots = (_Argument * SLOTS)()
        keep = []
        for slot, value in zip(slots, arguments, strict=False):
            if value is None:
                continue
            if isinstance(value, Bytes):
                buffer = ctypes.create_string_buffer(value.data, len(value.data))
                keep.append(buffer)
                slot.kind, slot.data, slot.length = 2, ctypes.addressof(buffer), len(value.data)
                continue
            array, offset = (value.array, value.offset) if isinstance(value, At) else (value, 0)
            slot.kind, slot.data, slot.length, slot.offset = 1, array.ctypes.data, array.nbytes, offset
        sizes = (ctypes.c_size_t * SLOTS)(*[(lengths or {}).get(i, 0) for i in range(SLOTS)])
        _check(harness().harness_dispatch(self.handle, slots, sizes, _size(grid), _size(threads), int(exact)))
        costs = harness().harness_costs()
        return Costs.scaled(json.loads(costs)) if costs else None


def _size(value):
    parts = (value,) if isinstance(value, int) else tuple(value)
    return (ctypes.c_uint64 * 3)(*parts, *([1] * (3 - len(parts))))
