"""Tensors on mps in a file's own pages (csrc/mps/file_buffer.mm). Nothing may write them, and many of them share a
buffer, so they are copied and saved in other ways than tensors with memory of their own."""

import torch
from torch import Tensor


def is_mapped(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "mps" and torch.ops.moe_metal._is_mapped(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """The same pages as a tensor on the CPU, with a storage of its own bytes only; other tensors as they are."""
    return torch.ops.moe_metal._in_pages(tensor) if is_mapped(tensor) else tensor


def mapped_bytes() -> int:
    """The bytes of files that are in Metal buffers. `torch.mps.current_allocated_memory()` does not count them."""
    return torch.ops.moe_metal._mapped_bytes() if hasattr(torch.ops.moe_metal, "_mapped_bytes") else 0
