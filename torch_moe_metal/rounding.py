"""The numbers of the specification: computed in float32 or wider, and rounded once."""

import torch
from torch import Tensor


def as_float(x: Tensor) -> Tensor:
    """At least float32: float64 inputs stay float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rounded(x: Tensor, like: Tensor) -> Tensor:
    """The only rounding of a result, to a contiguous tensor in the activations' dtype."""
    return x.to(like.dtype).contiguous()


def normed(x: Tensor, eps: float) -> Tensor:
    """norm(x) = x * rsqrt(mean(x^2) + eps), over the last dimension."""
    return as_float(x) * torch.rsqrt(as_float(x).square().mean(-1, keepdim=True) + eps)
