"""Decides when PyTorch's own ops must run instead of ours, which have no backward and no jvp, and warns about it."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def wants_grad(module: nn.Module, *tensors: Tensor | None) -> bool:
    """Whether autograd would record a call of this module with these tensors, or carry a tangent through it."""
    forward_mode = in_forward_mode()
    if not forward_mode and not torch.is_grad_enabled():
        return False
    used = [*filter(torch.is_tensor, tensors), *module.parameters()]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used):
        if torch.compiler.is_exporting():
            warn_once(
                "the export holds PyTorch's own ops, since it records a gradient; under torch.no_grad() it has ours"
            )
        return True
    # torch.compile traces dual tensors without their tangents.
    return forward_mode and (torch.compiler.is_compiling() or any(map(has_tangent, used)))


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside of dual_level or torch.func.jvp."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def autocasts(x: Tensor) -> bool:
    """Whether PyTorch's own products of x would run in the dtype of torch.autocast."""
    kind = x.device.type
    return kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)


def traced_as_constant(function: Callable) -> Callable:
    """Like torch.compiler.assume_constant_result, without importing the compiler, which takes seconds: torch.compile
    and torch.export call this function while they trace and use only its return value."""
    function._dynamo_marked_constant = True
    return function


warned: set[str] = set()


@traced_as_constant
def warn_once(message: str) -> None:
    """Works eagerly and while torch.compile or torch.export traces."""
    if message not in warned:
        warned.add(message)
        warnings.warn(f"torch_moe_metal: {message}", stacklevel=3)
