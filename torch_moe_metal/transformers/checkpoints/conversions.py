"""Operations and helpers of transformers' weight conversions that several of our quantizers use."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..fusing.packed_modules import PROJECTIONS, Parts


def of_each(given: dict, change: Callable[[Tensor], Tensor]) -> dict:
    """Applies `change` to each tensor, also in lists."""
    return {
        name: [change(tensor) for tensor in tensors] if isinstance(tensors, list) else change(tensors)
        for name, tensors in given.items()
    }


class AsBytes(ConversionOps):
    """Reinterprets float8 as uint8, which every device can stack and concatenate."""

    dtypes = (torch.float8_e4m3fn, torch.uint8)

    def convert(self, input_dict, **kwargs):
        before, after = self.dtypes
        return of_each(input_dict, lambda tensor: tensor.view(after) if tensor.dtype == before else tensor)

    @property
    def reverse_op(self) -> ConversionOps:
        return AsFloats()


class AsFloats(AsBytes):
    dtypes = (torch.uint8, torch.float8_e4m3fn)

    @property
    def reverse_op(self) -> ConversionOps:
        return AsBytes()


def merged(operations: list[ConversionOps], tensors: dict, **kwargs) -> dict:
    for operation in operations:
        tensors = operation.convert(tensors, **kwargs)
    return tensors


def merges_experts(conversion: WeightConverter) -> bool:
    """Whether it merges the weights of single experts into one tensor."""
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    whole = len(targets) == 1 and targets[0].rpartition(".")[2] in PROJECTIONS.values()
    return whole and all(source.endswith(".weight") for source in sources)


def packed_weight(model: nn.Module, name: str) -> tuple[nn.Module, str | None]:
    """The module of a parameter, and the packed weight whose data has this name, or None."""
    home, _, part = name.rpartition(".")
    module = model.get_submodule(home)
    packing = getattr(module, "packing", {})
    return module, next((weight for weight, names in packing.items() if names[0] == part), None)


def full_tensor_names(model: nn.Module, name: str, parts: Parts) -> dict[str, Tensor]:
    """Names these parts of the weight `name` as in the model's state. Raises if a shape differs from the model's."""
    home = name.rpartition(".")[0]
    for part, tensor in parts.items():
        expected = model.get_submodule(home)._buffers[part].shape
        if tensor.shape != expected:
            raise ValueError(f"{home}.{part}: expected shape {list(expected)}, got {list(tensor.shape)}")
    return {f"{home}.{part}": tensor for part, tensor in parts.items()}
