"""What a checkpoint's safetensors files say they hold, read before anything is loaded, and whether it fits together."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..packing import FP8_BLOCK

#: The dtypes that parts of packed weights have, by safetensors' words for them.
SAFETENSORS = {
    "U8": torch.uint8,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: `dtype` is safetensors' word."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def expect(self, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(
                f"torch_moe_metal: {self.file}: {self.name}: expected {expected}, got {self.dtype} {list(self.shape)}"
            )

    def beside(self, tensors: Mapping[str, "Stored"], name: str) -> "Stored":
        """Another one that must be there if this one is."""
        if name not in tensors:
            raise ValueError(f"torch_moe_metal: {self.file}: {self.name}: expected {name} beside it, which is missing")
        return tensors[name]


def stored_tensors(files: Iterable[str] | None) -> dict[str, Stored]:
    """All tensors of these safetensors files. Files of other kinds are passed over."""
    found = {}
    for file in map(Path, files or ()):
        if file.suffix == ".safetensors":
            for name, entry in header(file).items():
                found[name] = Stored(name, file, entry["dtype"], tuple(entry["shape"]))
    return found


def header(file: Path) -> dict[str, dict]:
    """dtype, shape and place of each tensor, or an error where the file ends before its last one does."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"torch_moe_metal: {file}: expected a header of {length} bytes, got {max(0, size - 8)}")
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise ValueError(f"torch_moe_metal: {file}: {name}: expected {end} bytes up to its end, got {size}")
    return entries


def check_mxfp4(tensors: Mapping[str, Stored]) -> None:
    """gpt-oss: `*_blocks` [..., N, C / 32, 16], and beside them `*_scales` [..., N, C / 32]."""
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            tensor.beside(tensors, f"{name.removesuffix('scales')}blocks")
        if name.endswith("_blocks"):
            scales = tensor.beside(tensors, f"{name.removesuffix('blocks')}scales")
            tensor.expect(tensor.dtype == "U8" and tensor.shape[-1] == 16, "U8 [..., N, C / 32, 16]")
            of_blocks = list(tensor.shape[:-1])
            scales.expect(
                scales.dtype == "U8" and list(scales.shape) == of_blocks, f"U8 {of_blocks}, one for each of its blocks"
            )


def check_fp8(tensors: Mapping[str, Stored]) -> None:
    """`*.weight` [N, C] of float8, and beside it `*.weight_scale_inv` [N / 128, C / 128], rounded up. Some call the
    scales otherwise."""
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "weight_scale_inv":
            tensor.beside(tensors, f"{stem}.weight")
        if last == "weight" and tensor.dtype == "F8_E4M3":
            names = [f"{stem}.{other}" for other in ("weight_scale_inv", "scale", "qscale_weight")]
            scale = tensor.beside(tensors, next((name for name in names if name in tensors), names[0]))
            blocks = [-(-size // FP8_BLOCK) for size in tensor.shape]
            scale.expect(list(scale.shape) == blocks, f"{blocks}, a scale for each 128 x 128 block of {name}")
