"""Reads GGUF files: their header, checked before anything is loaded, and their tensors in the mapped pages of the file.

    file = read("model-Q4_K_M.gguf")         # with the other parts of a split file
    file.metadata["general.architecture"]
    file.tensors["blk.0.ffn_down_exps.weight"].mapped()

Weights are GGML's blocks, which the ops read without conversion if `formats` has a reader for them.
"""

import functools
import os
import re
import struct
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .. import huge_pages
from ..formats import FORMATS

#: GGML's type numbers, and our names of the types.
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
INTEGERS = {24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64}
BLOCKS = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
    14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 39: "ggml_mxfp4",
}  # fmt: skip
#: Types without a reader: columns and bytes of a block.
OTHERS = {
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 29: ("iq1_m", 256, 56), 34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
}  # fmt: skip
#: struct's codes of scalars, by GGUF's numbers of metadata types.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4  # GGML's limit
#: The attribute of a model for the stamps of its files.
STAMPS = "_moe_metal_stamps"
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file. `shape` is that of PyTorch, in elements; `format` is our name of its type."""

    name: str
    file: Path
    shape: tuple[int, ...]
    type: int
    format: str
    begin: int
    bytes: int
    pages: torch.UntypedStorage = field(repr=False, compare=False)

    def expect(self, right: bool, expected: str) -> None:
        if not right:
            got = f"{self.format} {list(self.shape)}"
            raise ValueError(f"torch_moe_metal: {self.file}: {self.name}: expected {expected}, got {got}")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in elements of `stored_dtype`."""
        return (*self.shape[:-1], self.bytes // prod(self.shape[:-1])) if self.is_packed else self.shape

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_packed else (FLOATS | INTEGERS)[self.type]

    @property
    def is_packed(self) -> bool:
        """Whether it has blocks instead of plain elements."""
        return self.type not in FLOATS | INTEGERS

    @property
    def has_reader(self) -> bool:
        return self.format in FORMATS

    def mapped(self) -> Tensor:
        """The elements or blocks in the file's mapped pages. They are read from disk when they are used."""
        dtype = self.stored_dtype
        return torch.empty(0, dtype=dtype).set_(self.pages, self.begin // dtype.itemsize, self.stored_shape)


@dataclass(frozen=True)
class Stamp:
    """A file as it was when its pages were mapped, and their addresses."""

    file: Path
    inode: int
    size: int
    changed: int  # in nanoseconds
    addresses: range
    buffers: frozenset[int] = frozenset()  # Metal's, over the same pages

    def is_of(self, found: os.stat_result) -> bool:
        return (found.st_ino, found.st_size, found.st_mtime_ns) == (self.inode, self.size, self.changed)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the file's pages."""
        if tensor.device.type == "mps":
            return tensor.untyped_storage().data_ptr() in self.buffers
        return tensor.device.type == "cpu" and tensor.data_ptr() in self.addresses

    def expect_unchanged(self, tensors: Iterable[Tensor]) -> None:
        """Raises if the file has changed and one of the tensors is in its pages. A file that has been replaced or
        deleted keeps its pages."""
        now = self.file.stat() if self.file.exists() else None
        if now is None or now.st_ino != self.inode or (now.st_size, now.st_mtime_ns) == (self.size, self.changed):
            return
        if any(map(self.holds, tensors)):
            raise ValueError(
                f"torch_moe_metal: {self.file}: expected the file as it was when the model was loaded, since its pages "
                "are the model's weights, got a changed file: load the model again"
            )


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a file, or of all parts of a split file."""

    path: Path
    metadata: dict
    tensors: dict[str, GgufTensor]
    stamps: tuple[Stamp, ...] = ()

    def expect_as_read(self) -> None:
        """Raises if a file has changed since its header was read."""
        for stamp in self.stamps:
            now = stamp.file.stat() if stamp.file.exists() else None
            if now is not None and stamp.is_of(now):
                continue
            own = [tensor for tensor in self.tensors.values() if tensor.file == stamp.file]
            size = now.st_size if now else 0
            cut = next((tensor for tensor in own if tensor.begin + tensor.bytes > size), None)
            name = f"{cut.name}: expected {cut.bytes} bytes from byte {cut.begin} on" if cut else "expected the file"
            got = f"a changed file of {size} bytes" if now else "no file"
            raise ValueError(f"torch_moe_metal: {stamp.file}: {name}, of {stamp.size} when it was opened, got {got}")


def architecture_of(file: GgufFile) -> str:
    """The architecture. Mixtral's files say "llama", like those of dense models, whose name stays."""
    found = file.metadata.get("general.architecture")
    if not isinstance(found, str):
        raise ValueError(f"torch_moe_metal: {file.path}: general.architecture: expected a name, got {found!r}")
    return "mixtral" if found == "llama" and file.metadata.get("llama.expert_count") else found


def pages(file: Path) -> torch.UntypedStorage:
    """A whole file, mapped privately: writes stay in memory and never reach the file."""
    mapped = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    huge_pages.for_file(mapped)
    return mapped


def parts_of(path: Path, count: int) -> list[Path]:
    """The paths of all parts of a split file, given one of them."""
    found = SPLIT.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ValueError(
            f"torch_moe_metal: {path}: expected a name such as model-00001-of-{count:05}.gguf, since split.count is "
            f"{count}"
        )
    return [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read(path: str | Path, strings: Container[str] = ()) -> GgufFile:
    """Read the headers of a file and all its other parts. The metadata has only the lengths of arrays of strings,
    except for those in `strings`, because a vocabulary is long."""
    path = Path(path)
    header = Header(path, strings)
    count = header.metadata.get("split.count", 1)
    header.expect(type(count) is int and count >= 0, "split.count", "a number of parts", count)
    headers = [header]
    if count > 1:
        paths = parts_of(path, count)
        for part in paths:
            if not part.is_file():
                raise FileNotFoundError(
                    f"torch_moe_metal: {path}: expected {part.name} in the same folder, which is missing"
                )
        headers = [header if part == path else Header(part) for part in paths]
        if path != paths[0]:
            headers[0] = header = Header(paths[0], strings)
    tensors = {}
    for part in headers:
        for name, tensor in part.tensors.items():
            part.expect(name not in tensors, name, "a tensor once", "it twice")
            tensors[name] = tensor
    return GgufFile(path, header.metadata, tensors, tuple(part.stamp for part in headers))


class Header:
    """The metadata and the table of tensors of one file. Each value is checked when it is read."""

    def __init__(self, path: Path, strings: Container[str] = ()):
        self.path, self.strings, self.at = path, strings, 0
        self.expect(path.is_file(), "", "a regular file", "none")
        found = path.stat()
        self.size = found.st_size
        self.expect(self.size >= 24, "", "a header of 24 bytes", self.size)
        self.pages = pages(path)
        addresses = range(self.pages.data_ptr(), self.pages.data_ptr() + self.size)
        self.stamp = Stamp(path, found.st_ino, self.size, found.st_mtime_ns, addresses)
        self.data = memoryview(torch.empty(0, dtype=torch.uint8).set_(self.pages).numpy())
        self.expect(bytes(self.data[:4]) == b"GGUF", "", "the magic bytes GGUF", bytes(self.data[:4]))
        self.at = 4
        version = self.number("I", "version")
        big_endian = version in [int.from_bytes(each.to_bytes(4, "big"), "little") for each in VERSIONS]
        self.expect(not big_endian, "", "numbers with their lowest byte first", "a big-endian file")
        self.expect(version in VERSIONS, "version", " or ".join(map(str, VERSIONS)), version)
        tensors, values = self.number("Q", "number of tensors"), self.number("Q", "number of metadata")
        self.metadata = self.read_metadata(values)
        self.tensors = self.read_tensors(tensors)

    def expect(self, right: bool, what: str, expected: object, got: object) -> None:
        if not right:
            name = f"{what}: " if what else ""
            raise ValueError(f"torch_moe_metal: {self.path}: {name}expected {expected}, got {got!r}")

    def take(self, count: int, what: str) -> memoryview:
        """The next bytes."""
        left = self.size - self.at
        self.expect(count <= left, what, f"{count} more bytes in the file", left)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str):
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        found = bytes(self.take(self.number("Q", what), what))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"torch_moe_metal: {self.path}: {what}: expected UTF-8, got {error}") from None

    def name(self, what: str) -> str:
        found = self.string(what)
        self.expect(found.isprintable(), what, "printable characters", found[:80])
        return found

    def expect_count(self, count: int, least: int, what: str) -> None:
        """Raises if the rest of the file is too short for `count` items of at least `least` bytes."""
        self.expect(count <= (self.size - self.at) // least, what, "as many as the file has room for", count)

    def read_metadata(self, count: int) -> dict:
        self.expect_count(count, 13, "number of metadata")
        found = {}
        for _ in range(count):
            key = self.name("a key of the metadata")
            self.expect(key not in found, key, "a key once", "it twice")
            found[key] = self.value(key)
        return found

    def value(self, key: str):
        kind = self.number("I", key)
        if kind in SCALARS:
            return self.number(SCALARS[kind], key)
        if kind == STRING:
            return self.string(key)
        self.expect(kind == ARRAY, key, "a value of a type that GGUF has", kind)
        kind, count = self.number("I", key), self.number("Q", key)
        if kind in SCALARS:
            code = SCALARS[kind]
            self.expect_count(count, struct.calcsize(f"<{code}"), key)
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"), key)))
        self.expect(kind == STRING, key, "an array of numbers or strings", f"one of type {kind}")
        self.expect_count(count, 8, key)
        if key in self.strings:
            return [self.string(key) for _ in range(count)]
        data, at = self.data, self.at  # local names: a vocabulary has many strings
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        self.take(at - self.at, key)
        return count

    def read_tensors(self, count: int) -> dict[str, GgufTensor]:
        self.expect_count(count, 24, "number of tensors")
        entries = {}
        for _ in range(count):
            name = self.name("a tensor's name")
            self.expect(name not in entries, name, "a tensor once", "it twice")
            dimensions = self.number("I", name)
            self.expect(1 <= dimensions <= MAX_DIMENSIONS, name, f"1 to {MAX_DIMENSIONS} dimensions", dimensions)
            shape = tuple(self.number("Q", name) for _ in range(dimensions))[::-1]
            entries[name] = shape, self.number("I", name), self.number("Q", name)
        alignment = self.metadata.get("general.alignment", 32)
        right = type(alignment) is int and alignment > 0 and alignment % 8 == 0
        self.expect(right, "general.alignment", "a multiple of 8", alignment)
        begin = -(-self.at // alignment) * alignment
        return {name: self.tensor(name, *entry, begin, alignment) for name, entry in entries.items()}

    def tensor(self, name: str, shape: tuple, type: int, offset: int, begin: int, alignment: int) -> GgufTensor:
        format, columns, size = block_of(type)
        self.expect(format is not None, name, "a type that GGML has", type)
        self.expect(all(shape), name, "a shape without 0", list(shape))
        self.expect(shape[-1] % columns == 0, name, f"rows of a multiple of {columns} in {format}", shape[-1])
        bytes = prod(shape) // columns * size
        self.expect(offset % alignment == 0, name, f"a place that is a multiple of {alignment}", offset)
        left = max(self.size - begin, 0)
        self.expect(offset + bytes <= left, name, f"{bytes} bytes from byte {offset} on, of those of all tensors", left)
        return GgufTensor(name, self.path, shape, type, format, begin + offset, bytes, self.pages)


@functools.cache
def block_of(type: int) -> tuple[str | None, int, int]:
    """For one of GGML's types: our name of it, and the columns and bytes of a block."""
    if type in BLOCKS:
        format = FORMATS[BLOCKS[type]]
        return format.name, format.columns, format.bytes
    if type in OTHERS:
        return OTHERS[type]
    dtype = (FLOATS | INTEGERS).get(type)
    return (None, 1, 0) if dtype is None else (str(dtype).removeprefix("torch."), 1, dtype.itemsize)
