"""A pytest plugin that runs the ops of packed weights on an emulated ARM processor. The tests do not change.

    python -m pytest -p arm.emulated test_ggml.py -k dequantize      # in tests/

ARM_CALLS is the program made by build.py. Each call is sent to it through a pipe, with the bytes of its arguments.
"""

import atexit
import ctypes
import os
import struct
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from arm.build import OPS, command

# c10::ScalarType
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
    torch.uint16: 27, torch.uint32: 28, torch.uint64: 29,
}  # fmt: skip
BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
NONE, TENSOR, INT, FLOAT, BOOL, STRING = range(6)


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes from a tensor's first to its last element."""
    if tensor.numel() == 0:
        return memoryview(b"")
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bytes_ = span * tensor.itemsize
    return memoryview((ctypes.c_char * bytes_).from_address(tensor.data_ptr())).cast("B")


def packed(value: object) -> list[bytes | memoryview]:
    match value:
        case None:
            return [bytes([NONE])]
        case Tensor():
            data = memory_of(value)
            shape = ints(DTYPES[value.dtype], value.dim(), *value.shape, *value.stride(), data.nbytes)
            return [bytes([TENSOR]), shape, data]
        case bool():
            return [bytes([BOOL, value])]
        case int():
            return [bytes([INT]), ints(value)]
        case float():
            return [bytes([FLOAT]), struct.pack("<d", value)]
        case str():
            return [bytes([STRING]), ints(len(value)), value.encode()]
        case torch.dtype():
            return [bytes([INT]), ints(DTYPES[value])]
    raise TypeError(f"{value!r}")


class Emulated:
    """The process, which starts with the first call. It is started again if a read out of bounds has ended it."""

    def __init__(self, program: Path):
        self.command = command(program)
        self.process: subprocess.Popen | None = None
        self.calls = 0

    def call(self, name: str, values: list) -> Tensor:
        if self.process is None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            atexit.register(self.process.kill)
        try:
            self.write(ints(len(name)), name.encode(), ints(len(values)))
            for value in values:
                self.write(*packed(value))
            self.process.stdin.flush()
            (done,) = self.read_ints(1)
        except (EOFError, BrokenPipeError):
            status, self.process = self.process.wait(), None
            raise RuntimeError(f"the emulated {name} ended with {status}") from None
        if not done:
            raise RuntimeError(self.read(*self.read_ints(1)).decode())
        self.calls += 1
        return self.read_tensor()

    def write(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self.process.stdin.write(part)

    def read(self, count: int) -> bytearray:
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise EOFError
        return bytearray(data)

    def read_ints(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self.read(8 * count))

    def read_tensor(self) -> Tensor:
        code, dims = self.read_ints(2)
        shape, dtype = self.read_ints(dims), BY_CODE[code]
        result = torch.empty(shape, dtype=dtype)
        if result.numel():
            data = self.read(result.nbytes)
            result.copy_(torch.frombuffer(data, dtype=dtype).view(shape))
        return result


def take_over(library: torch.library.Library, name: str, emulated: Emulated) -> None:
    schema = getattr(torch.ops.moe_metal, name).default._schema

    def kernel(*args, **named):
        values = []
        for i, argument in enumerate(schema.arguments):
            default = argument.default_value
            value = args[i] if i < len(args) else named.get(argument.name, default)
            if str(argument.type) in ("float", "Optional[float]") and value is not None:
                value = float(value)
            values.append(value)
        return emulated.call(name, values)

    library.impl(name, kernel, "CPU", allow_override=True)


emulated = Emulated(Path(os.environ["ARM_CALLS"]))


def pytest_configure(config) -> None:
    import torch_moe_metal  # noqa: F401  the ops

    config.library = torch.library.Library("moe_metal", "IMPL")
    for name in OPS:
        take_over(config.library, name, emulated)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"{emulated.calls} calls on ARM")
