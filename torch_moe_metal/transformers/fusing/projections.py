"""Linear layers that read the same input, such as q_proj, k_proj and v_proj, multiplied as one.

`join` lays their weights out behind one another in one memory. Each layer keeps its own parameters, which are views of
that memory, so names, shapes and values stay as they are. Whether the layers still lie so is found out at each call:
weights may be moved, loaded or replaced at any time, and then each layer runs alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...formats import FORMATS
from ...layers import Linear

ops = torch.ops.moe_metal


def tensors_of(layer: nn.Linear) -> list[Tensor | None]:
    """The parts of its weight, and its bias."""
    weight = layer.parts("weight") if isinstance(layer, Linear) else [layer.weight]
    return [*weight, layer.bias]


def alike(layers: Sequence[nn.Linear]) -> bool:
    """Whether one call could multiply with all of them."""
    kinds = {type(layer) for layer in layers}
    if kinds == {Linear}:
        format = FORMATS[layers[0].format]
        whole_blocks = all(layer.out_features % format.rows_per_scale == 0 for layer in layers[:-1])
        with_factor = format.offset == "factor" and any(layer.parts("weight")[2] is not None for layer in layers)
        return whole_blocks and not with_factor and {layer.format for layer in layers} == {format.name}
    return kinds == {nn.Linear}


def join(layers: Sequence[nn.Linear]) -> None:
    """Give the weights of these layers one memory, where that is possible."""
    if not alike(layers):
        return
    for tensors in zip(*map(tensors_of, layers), strict=True):
        if all(map(can_move, tensors)) and same_rows(tensors) and not is_joined(tensors):
            whole = torch.cat([tensor.detach() for tensor in tensors])
            for tensor, rows in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
                tensor.data = rows


def can_move(tensor: Tensor | None) -> bool:
    """Whether it is a plain tensor of this process alone."""
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
    """Whether these lie behind one another, in the memory of the first."""
    first = tensors[0]
    if type(first) not in (Tensor, nn.Parameter):  # fake tensors, for one, lie nowhere
        return False
    at = begin = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return False
        at += tensor.nbytes
    memory = first.untyped_storage()
    return begin < at <= memory.data_ptr() + memory.nbytes()


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """All of them as one tensor; None if there is none of them."""
    first = tensors[0]
    if first is None:
        return None
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def project(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """What each of the layers makes of x: views of one result where their weights are joined."""
    # A compiled graph has each weight as an input of its own.
    if torch.compiler.is_compiling() or not alike(layers):
        return [layer(x) for layer in layers]
    tensors = list(zip(*map(tensors_of, layers), strict=True))
    for parts in tensors:
        if (given := sum(part is not None for part in parts)) and (given < len(parts) or not is_joined(parts)):
            return [layer(x) for layer in layers]
    *weight, bias = map(joined, tensors)
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        return [layer(x) for layer in layers]
    first = layers[0]
    if isinstance(first, Linear):
        output = ops.linear(x, *weight, bias, format=first.format)
    else:
        output = F.linear(x, *weight, bias)
    return output.split([layer.out_features for layer in layers], -1)
