"""Multiplies linear layers with the same input, such as q_proj, k_proj and v_proj, in one product.

`join` puts their weights one after the other into one storage. Each layer keeps its own parameters, which become views
of that storage, so names, shapes and values do not change. Each call checks whether the weights are still joined,
because they may be moved, loaded or replaced at any time. If they are not, each layer runs separately.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import joining
from ...arguments import DTYPES
from ...formats import FORMATS
from ...packed_layers import Linear
from ...refused import is_refused

ops = torch.ops.moe_metal

#: Up to so many tokens dense products are ours.
FEW_TOKENS = 8


def tensors_of(layer: nn.Linear) -> list[Tensor | None]:
    """The parts of its weight, and its bias."""
    weight = layer.parts("weight") if isinstance(layer, Linear) else [layer.weight]
    return [*weight, layer.bias]


def alike(first: nn.Linear, second: nn.Linear) -> bool:
    """Whether one product can compute both layers."""
    kind = type(first)
    if kind is not type(second) or kind not in (nn.Linear, Linear):
        return False
    if kind is nn.Linear:
        return True
    if first.format != second.format:
        return False
    format = FORMATS[first.format]
    with_factor = format.offset == "factor" and any(layer.parts("weight")[2] is not None for layer in (first, second))
    return first.out_features % format.rows_per_scale == 0 and not with_factor


def neighbours(layers: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """The layers, in lists of neighbours that are alike."""
    found: list[list[nn.Linear]] = []
    for layer in layers:
        if found and alike(found[-1][-1], layer):
            found[-1].append(layer)
        else:
            found.append([layer])
    return found


def join(layers: Sequence[nn.Linear]) -> None:
    """Move the weights of neighbours that are alike into one storage, if that is possible."""
    for together in neighbours(layers):
        for tensors in zip(*map(tensors_of, together), strict=True):
            if all(map(can_move, tensors)) and same_rows(tensors) and not is_joined(tensors):
                whole = joining.cat([tensor.detach() for tensor in tensors])
                for tensor, rows in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
                    tensor.data = rows


def can_move(tensor: Tensor | None) -> bool:
    """Whether it is a plain tensor that no other process shares."""
    return (
        tensor is not None
        and type(tensor.data) is Tensor
        and tensor.device.type != "meta"
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.is_shared())
    )


def same_rows(tensors: Sequence[Tensor]) -> bool:
    return len({(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}) == 1


def is_joined(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors follow one another in the storage of the first."""
    first = tensors[0]
    if type(first) not in (Tensor, nn.Parameter):  # others, such as fake tensors, may have no memory
        return False
    at = begin = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return False
        at += tensor.nbytes
    memory = first.untyped_storage()
    return begin < at <= memory.data_ptr() + memory.nbytes()


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """All of them as one tensor; None if they are None."""
    first = tensors[0]
    if first is None:
        return None
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def project(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """The results of the layers for x. If the weights of neighbours are joined, their results are views of one."""
    if torch.compiler.is_compiling():  # a compiled graph has each weight as an input of its own
        return [layer(x) for layer in layers]
    return [output for together in neighbours(layers) for output in outputs_of(x, together)]


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """The result of an unmodified linear layer."""
    [output] = project(x, [layer])
    return output


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A dense product. On mps, PyTorch's own takes longer on the host than all of a layer's other ops."""
    few = x.numel() <= FEW_TOKENS * x.shape[-1] and not is_refused("linear", x)
    plain = few and x.dtype in DTYPES and type(weight) in (Tensor, nn.Parameter) and weight.dtype == x.dtype
    return ops.linear(x, weight, bias=bias) if plain and x.numel() else F.linear(x, weight, bias)


def outputs_of(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """The results of layers that are alike."""
    if len(layers) == 1:
        [layer] = layers
        return [linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)]
    tensors = list(zip(*map(tensors_of, layers), strict=True))
    for parts in tensors:
        if (given := sum(part is not None for part in parts)) and (given < len(parts) or not is_joined(parts)):
            return [layer(x) for layer in layers]
    *weight, bias = map(joined, tensors)
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        return [layer(x) for layer in layers]
    first = layers[0]
    if isinstance(first, Linear):
        if is_refused("linear", x):
            return [layer(x) for layer in layers]
        output = ops.linear(x, *weight, bias, format=first.format)
    else:
        output = linear(x, *weight, bias)
    return output.split_with_sizes([layer.out_features for layer in layers], -1)
