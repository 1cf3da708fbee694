"""A prefix as a file of safetensors: its tokens, the rows of its cache, and its snapshots.

It is written tensor by tensor, so that no copy of the whole is made, and with a checksum, since a wrong number would
change answers without an error. It is read as mapped pages.
"""

import json
import mmap
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache

from ...transformers.fusing.snapshots import Kept, Snapshot, fill
from .prefixes import Prefix

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
Rows = list[dict[str, Tensor]]  # of each layer, as `snapshots.rows_of` returns them


def named(prefix: Prefix, rows: Rows) -> dict[str, Tensor]:
    """All tensors of a file. Those with the largest elements come first, so that all are aligned."""
    found = {"ids": torch.tensor(prefix.ids, dtype=torch.int32)}
    found |= {f"{i}.{name}": value for i, own in enumerate(rows) for name, value in own.items()}
    for length, snapshot in prefix.snapshots.items():
        for i, kept in enumerate(snapshot.layers):
            found |= {f"{length}.{i}.{j}": each for j, each in enumerate(kept.copies) if each is not None}
    return dict(sorted(found.items(), key=lambda item: -item[1].itemsize))


def write(file: BinaryIO, prefix: Prefix, rows: Rows, key: str, to_cpu: Callable[[Tensor], Tensor]) -> None:
    """`key` names the model. `to_cpu` copies a tensor from its device."""
    snapshots = {
        length: [(kept.kind, kept.length, len(kept.copies)) for kept in snapshot.layers]
        for length, snapshot in prefix.snapshots.items()
    }
    about = {"prompt": prefix.prompt, "crops": prefix.crops, "layers": len(rows), "snapshots": snapshots}
    metadata = {"model": key, "prefix": json.dumps(about), "crc32": "0" * 8}
    tensors, entries, position = named(prefix, rows), {}, 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end

    def write_header() -> None:
        header = json.dumps({"__metadata__": metadata} | entries).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)

    write_header()
    checksum = zlib.crc32(metadata["prefix"].encode())
    for tensor in tensors.values():
        data = to_cpu(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(data, checksum)
        file.write(data)
    metadata["crc32"] = f"{checksum:08x}"
    file.seek(0)
    write_header()


def read_ids(path: Path, key: str) -> Prefix:
    """The prefix of a file without its cache. Raises any exception if the file is none of this model."""
    with safe_open(path, "pt") as file:
        about = about_of(file, key)
        ids = file.get_tensor("ids").tolist()
    lengths = dict.fromkeys(map(int, about["snapshots"]))
    return Prefix(None, bool(about["crops"]), ids, lengths, int(about["prompt"]))


def about_of(file: safe_open, key: str) -> dict:
    metadata = file.metadata() or {}
    if metadata.get("model") != key:
        raise ValueError("expected a prefix of this model")
    return json.loads(metadata["prefix"])


def read(path: Path, key: str, cache: DynamicCache, device: torch.device) -> Prefix:
    """The prefix of a file, with its cache in this new one. Raises any exception if the file is damaged."""
    check(path)
    prefix = read_ids(path, key)
    with safe_open(path, "pt") as file:
        about, names = about_of(file, key), set(file.keys())

        def tensor(name: str) -> Tensor | None:
            return file.get_tensor(name).to(device) if name in names else None

        rows: Rows = [{} for _ in range(about["layers"])]
        for name in names - {"ids"}:
            layer, _, last = name.partition(".")
            if not last[0].isdigit():
                rows[int(layer)][last] = tensor(name)
        prefix.snapshots = {
            int(length): Snapshot(
                tuple(
                    Kept(kind, tokens, tuple(tensor(f"{length}.{i}.{j}") for j in range(copies)))
                    for i, (kind, tokens, copies) in enumerate(layers)
                )
            )
            for length, layers in about["snapshots"].items()
        }
    fill(cache, rows, prefix.snapshots.get(len(prefix.ids)))
    if cache.get_seq_length() != len(prefix.ids):
        raise ValueError(f"expected {len(prefix.ids)} tokens, got {cache.get_seq_length()}")
    prefix.cache = cache
    return prefix


def check(path: Path) -> None:
    """Raise if the file is not what was written."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        begin = 8 + int.from_bytes(pages[:8], "little")
        with memoryview(pages) as data, data[begin:] as tensors:
            checksum = zlib.crc32(tensors, zlib.crc32(metadata["prefix"].encode()))
    if metadata["crc32"] != f"{checksum:08x}":
        raise ValueError("the checksum is wrong")
