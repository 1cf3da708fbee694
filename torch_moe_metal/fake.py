"""Fake functions: what torch.compile and torch.export run in place of an op, to learn its outputs' shapes."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .warmup import MPS, is_warmup


def _hint(size: int | torch.SymInt) -> int | None:
    """The size that a symbolic one stands for, without a guard on it; None where PyTorch does not know any yet."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None


def _meta(tensor: Tensor) -> Tensor | None:
    sizes, strides = [_hint(size) for size in tensor.shape], [_hint(stride) for stride in tensor.stride()]
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def _check_devices(op: str, named: dict) -> None:
    """The checks get all tensors on meta, and can no longer tell where these are."""
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    first = next(iter(tensors), None)
    for name, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            raise RuntimeError(
                f"moe_metal::{op}: {name}: expected device {tensors[first].device}, the device of {first}; got "
                f"{tensor.device}"
            )


def _check(op: str, args: tuple, kwargs: dict) -> None:
    """Raise what the op itself would raise with such arguments. The checks are C++, which knows no symbolic sizes."""
    values = [*args, *kwargs.values()]
    metas = [_meta(value) if isinstance(value, Tensor) else value for value in values]
    if any(isinstance(value, Tensor) and meta is None for value, meta in zip(values, metas, strict=True)):
        return  # The op checks when it runs.
    positional, named = metas[: len(args)], dict(zip(kwargs, metas[len(args) :], strict=True))
    getattr(torch.ops.moe_metal_checks, op)(*positional, **named)


def fake(specification: Callable) -> Callable:
    """The checks of an op, so that what it refuses fails where the user can see it, and its specification's outputs.
    In a warm-up call the MPS kernel runs instead, which makes the same checks and compiles."""
    name = specification.__name__
    names = tuple(inspect.signature(specification).parameters)

    @functools.wraps(specification)
    def function(*args, **kwargs):
        if is_warmup():
            getattr(torch.ops.moe_metal, name).default.redispatch(MPS, *args, **kwargs)
        else:
            _check_devices(name, dict(zip(names, args, strict=False)) | kwargs)
            with unset_fake_temporarily():
                _check(name, args, kwargs)
        return specification(*args, **kwargs)

    return function
