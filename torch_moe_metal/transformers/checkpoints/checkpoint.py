"""Reads and checks the headers of a checkpoint's safetensors files, before anything is loaded."""

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...packing import FP8_BLOCK

#: The dtypes of parts of packed weights, by safetensors' names.
SAFETENSORS = {
    "U8": torch.uint8,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
#: The stored dtypes of scales and offsets, and of dense weights.
SCALES = ("F32", "F16", "BF16")
FP8_SCALES = ("F32", "BF16")
#: Powers of two, one byte each, which become float32 while loading: DeepSeek V4's scales.
POWERS = "F8_E8M0"
FLOATS = (*SCALES, "F64")
#: Bits of an element, by safetensors' dtypes.
NUMBER_BITS = (
    dict.fromkeys(("F4",), 4)
    | dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6)
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
    | dict.fromkeys(("U32", "I32", "F32"), 32)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
)
LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `dtype` is safetensors' name; `begin` is the position of its first byte in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def expect(self, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(
                f"torch_moe_metal: {self.file}: {self.name}: expected {expected}, got {self.dtype} {list(self.shape)}"
            )

    def expect_floats(self) -> None:
        self.expect(self.dtype in FLOATS, "floats, F64, F32, F16 or BF16")

    def expect_scales(self, shape: tuple[int, ...], what: str) -> None:
        self.expect(self.dtype in SCALES and self.shape == shape, f"F32, F16 or BF16 {list(shape)}, {what}")

    def require_sibling(self, tensors: Mapping[str, "Stored"], name: str) -> "Stored":
        """The tensor of this name. Raises if it is missing."""
        if name not in tensors:
            raise ValueError(f"torch_moe_metal: {self.file}: {self.name}: expected {name} as well, which is missing")
        return tensors[name]

    def read(self) -> list[int | float]:
        """Its few elements: integers of 32 or 64 bits, or float32."""
        dtype = {"I32": torch.int32, "I64": torch.int64, "F32": torch.float32}[self.dtype]
        with open(self.file, "rb") as opened:
            opened.seek(self.begin)
            numbers = opened.read(prod(self.shape) * dtype.itemsize)
        return torch.frombuffer(bytearray(numbers), dtype=dtype).tolist() if numbers else []


def stored_tensors(files: Iterable[str] | None) -> dict[str, Stored]:
    """All tensors of these safetensors files. Other files are skipped."""
    found = {}
    for file in map(Path, files or ()):
        if file.suffix == ".safetensors":
            entries, begin = header(file)
            for name, entry in entries.items():
                begins = begin + entry["data_offsets"][0]
                found[name] = Stored(name, file, entry["dtype"], tuple(entry["shape"]), begins)
    return found


def header(file: Path) -> tuple[dict[str, dict], int]:
    """dtype, shape and position of each tensor, and where the first one begins. Raises if the header is broken or the
    file is too short for its tensors."""

    def expect(right: bool, expected: str, got: object) -> None:
        if not right:
            raise ValueError(f"torch_moe_metal: {file}: expected {expected}, got {got}")

    status = file.stat()
    expect(stat.S_ISREG(status.st_mode), "a regular file", stat.filemode(status.st_mode))
    with open(file, "rb") as opened:
        length, available = int.from_bytes(opened.read(8), "little"), max(0, status.st_size - 8)
        expect(length <= LONGEST_HEADER, f"a header of {LONGEST_HEADER} bytes at most", length)
        expect(status.st_size >= 8 + length, f"a header of {length} bytes", available)
        try:
            entries = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"torch_moe_metal: {file}: expected a header in JSON, got one with {error}") from None
    expect(isinstance(entries, dict), "a header with the names of tensors", type(entries).__name__)
    metadata = entries.pop("__metadata__", {})
    plain = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    expect(plain, "__metadata__ of strings", metadata)
    for name, entry in entries.items():
        check_entry(file, name, entry, available - length)
    check_places(file, entries, available - length)
    return entries, 8 + length


def check_entry(file: Path, name: str, entry: object, size: int) -> None:
    """Check one tensor of a header. `size` is the bytes of all tensors."""

    def expect(right: bool, expected: str, got: object) -> None:
        if not right:
            raise ValueError(f"torch_moe_metal: {file}: {name}: expected {expected}, got {got}")

    def sizes(value: object) -> bool:
        return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)

    keys = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= entry.keys()
    expect(keys, "an entry with dtype, shape and data_offsets", entry)
    dtype, shape, places = entry["dtype"], entry["shape"], entry["data_offsets"]
    expect(isinstance(dtype, str) and dtype in NUMBER_BITS, "a dtype that safetensors has", repr(dtype))
    expect(sizes(shape), "a shape of integers", shape)
    expect(sizes(places) and len(places) == 2, "the bytes where it begins and where it ends", places)
    begin, end = places
    expect(end <= size, f"{end} bytes up to its end", size)
    expect(8 * (end - begin) == prod(shape) * NUMBER_BITS[dtype], f"the bytes of {dtype} {shape}", end - begin)


def check_places(file: Path, entries: Mapping[str, dict], size: int) -> None:
    """Check that tensors follow each other without gaps up to the end of the file, as safetensors requires."""
    before = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != before:
            raise ValueError(f"torch_moe_metal: {file}: {name}: expected it to begin at byte {before}, got {begin}")
        before = end
    if before != size:
        raise ValueError(f"torch_moe_metal: {file}: expected {before} bytes of tensors, got {size}")


def check_mxfp4(tensors: Mapping[str, Stored]) -> None:
    """gpt-oss: `*_blocks` [..., N, C / 32, 16], with `*_scales` [..., N, C / 32]."""
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            tensor.require_sibling(tensors, f"{name.removesuffix('scales')}blocks")
        if name.endswith("_blocks"):
            scales = tensor.require_sibling(tensors, f"{name.removesuffix('blocks')}scales")
            tensor.expect(tensor.dtype == "U8" and tensor.shape[-1:] == (16,), "U8 [..., N, C / 32, 16]")
            of_blocks = list(tensor.shape[:-1])
            scales.expect(
                scales.dtype == "U8" and list(scales.shape) == of_blocks, f"U8 {of_blocks}, one for each of its blocks"
            )


def check_fp8(tensors: Mapping[str, Stored]) -> set[str]:
    """`*.weight` [N, C] of float8, with `*.weight_scale_inv` [N / 128, C / 128], rounded up. Some
    checkpoints have other names for the scales. Returns the dtypes of the scales."""
    scales: list[Stored] = []
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "weight_scale_inv":
            weight = tensor.require_sibling(tensors, f"{stem}.weight")
            weight.expect(weight.dtype == "F8_E4M3", f"F8_E4M3, which {name} goes with")
        if last == "weight" and tensor.dtype == "F8_E4M3":
            names = [f"{stem}.{other}" for other in ("weight_scale_inv", "scale", "qscale_weight")]
            scale = tensor.require_sibling(tensors, next((name for name in names if name in tensors), names[0]))
            tensor.expect(len(tensor.shape) == 2, "F8_E4M3 [N, C]")
            blocks = [-(-size // FP8_BLOCK) for size in tensor.shape]
            scale.expect(list(scale.shape) == blocks, f"{blocks}, a scale for each 128 x 128 block of {name}")
            scale.expect(scale.dtype in (*FP8_SCALES, POWERS), f"scales in F32, BF16 or {POWERS}")
            scales.append(scale)
    for scale in scales:
        alike = (scale.dtype == POWERS) == (scales[0].dtype == POWERS)
        scale.expect(alike, f"{scales[0].dtype}, as {scales[0].name} is")
    return {scale.dtype for scale in scales}
