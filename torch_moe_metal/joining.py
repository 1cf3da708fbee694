"""Joins weights while a model is loaded or patched, of any size.

On mps `torch.cat` may write beyond a result of 2^31 elements or more, into other tensors (pytorch#189960). torch 2.14
mended that only for contiguous tensors of one dtype, so here no such result is its own.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ELEMENTS = 2**31 - 1


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """As `torch.cat`."""
    first = tensors[0]
    if first.device.type != "mps" or sum(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS:
        return torch.cat(tensors, dim)
    sizes, dtype = list(first.shape), functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    whole = first.new_empty(sizes, dtype=dtype)
    if dim == 0:
        for rows, tensor in zip(whole.split([len(tensor) for tensor in tensors]), tensors, strict=True):
            rows.copy_(tensor.to(dtype).contiguous())
    else:  # expert by expert
        for rows, *parts in zip(whole, *tensors, strict=True):
            rows.copy_(torch.cat(parts, dim - 1))
    return whole


def stack(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """As `torch.stack`."""
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim)
