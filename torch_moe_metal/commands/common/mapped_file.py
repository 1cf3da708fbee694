"""A test of Metal buffers over a file's own pages, on a small file."""

import tempfile
from pathlib import Path

import torch

from ... import packing
from ...file_pages import mapped_bytes


def report() -> tuple[bool, str]:
    """Whether the GPU reads a mapped file right, and a line about it."""
    weight = torch.linspace(-1, 1, 64 * 256).view(64, 256)
    blocks, *_ = packing.quantize(weight, "q8_0")
    ops, before = torch.ops.moe_metal, mapped_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "blocks")
        path.write_bytes(bytes(1000) + blocks.numpy().tobytes())
        views, reason = ops._map_file(str(path), path.stat().st_size, [1000], [path.stat().st_size])
        if reason:
            return True, f"files are copied to mps, since {reason}"
        size, options = mapped_bytes() - before, {"format": "q8_0", "dtype": torch.float32}
        got = ops.dequantize(views[0].view(blocks.shape), None, None, **options).cpu()
    right = torch.equal(got, ops.dequantize(blocks, None, None, **options))
    return right, f"a file in Metal buffers without a copy, {size} bytes: {'ok' if right else 'FAILED'}"
