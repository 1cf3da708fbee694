"""When PyTorch's own ops have to run instead of ours, which have no backward."""

import torch
from torch import Tensor, nn


def wants_grad(module: nn.Module, *tensors: Tensor | None) -> bool:
    """Whether autograd would record a call of this module with these tensors."""
    return torch.is_grad_enabled() and (
        any(tensor is not None and tensor.requires_grad for tensor in tensors)
        or any(parameter.requires_grad for parameter in module.parameters())
    )
