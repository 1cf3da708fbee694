"""Fake functions, which torch.compile and torch.export run instead of an op to get the shapes of its outputs."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .warmup import MPS, is_warmup


def _hint(size: int | torch.SymInt) -> int | None:
    """The value of a symbolic size, without a guard on it; None if PyTorch does not know it yet."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None


def _meta(tensor: Tensor) -> Tensor | None:
    sizes, strides = [_hint(size) for size in tensor.shape], [_hint(stride) for stride in tensor.stride()]
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def _check_devices(op: str, named: dict) -> None:
    """Raise if the tensors are on different devices. The C++ checks cannot see this, because they get meta
    tensors."""
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    first = next(iter(tensors), None)
    for name, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            raise RuntimeError(
                f"moe_metal::{op}: {name}: expected device {tensors[first].device}, the device of {first}; got "
                f"{tensor.device}"
            )


def _check(op: str, args: tuple, kwargs: dict) -> None:
    """Raise the same errors as the op with these arguments. The checks are C++ code without support for symbolic
    sizes."""
    values = [*args, *kwargs.values()]
    metas = [_meta(value) if isinstance(value, Tensor) else value for value in values]
    if any(isinstance(value, Tensor) and meta is None for value, meta in zip(values, metas, strict=True)):
        return  # the op itself checks when it runs
    positional, named = metas[: len(args)], dict(zip(kwargs, metas[len(args) :], strict=True))
    getattr(torch.ops.moe_metal_checks, op)(*positional, **named)


def fake(specification: Callable) -> Callable:
    """A fake function: it makes the checks of the op, so that bad arguments raise while the user's code is traced,
    and returns the outputs of the specification. In a warm-up call the MPS kernel runs instead, which makes the same
    checks, compiles, and allocates the outputs on meta."""
    name = specification.__name__
    shapes = getattr(specification, "shapes", specification)  # a specification that loops over tokens is too slow
    names = tuple(inspect.signature(specification).parameters)

    @functools.wraps(specification)
    def function(*args, **kwargs):
        if is_warmup():
            return getattr(torch.ops.moe_metal, name).default.redispatch(MPS, *args, **kwargs)
        _check_devices(name, dict(zip(names, args, strict=False)) | kwargs)
        with unset_fake_temporarily():
            _check(name, args, kwargs)
        return shapes(*args, **kwargs)

    return function
