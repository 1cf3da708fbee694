"""The quantizer of `MoeMetalConfig`: packs a dense checkpoint while it loads, and loads what was saved packed."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter
from transformers.quantizers import auto

from ...formats import FORMATS
from ..fusing.experts import DEVICES, NAME
from ..fusing.packed_modules import Parts, columns_of, dense_shape, empty_parts, quantize_like
from .checkpoint import FLOATS, SAFETENSORS, Stored
from .config import Form, MoeMetalConfig, pack_all
from .conversions import full_tensor_names, merged, merges_experts, packed_weight
from .quantizer import PackedQuantizer, absent, as_stored, find_tensor, require_packed, runs_here


class MoeMetal(PackedQuantizer):
    """Loads a dense checkpoint and packs it, or loads one that was saved packed."""

    kind = "moe_metal"
    quantization_config: MoeMetalConfig

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if device_map is not None and not runs_here(device_map):
            raise ValueError(f"torch_moe_metal: its packed weights run on {' and '.join(DEVICES)}, got {device_map}")
        require_packed(self.kind)

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        config = self.quantization_config

        def parts(name: str, dense: Tensor, form: Form) -> Parts:
            module, _, name = name.rpartition(".")
            found = empty_parts(name, dense.shape, form.format, form.bits, form.group_size, dense.dtype)
            if FORMATS[form.format].offset == "factor" and find_tensor(model, tensors, f"{module}.{name}_offset"):
                factor = torch.empty(*dense.shape[:-2], 1, dtype=torch.float32, device="meta")
                found = {**found, f"{name}_offset": factor}
            return as_stored(model, tensors, module, found) if self.pre_quantized else found

        if not self.pre_quantized:
            config.expect_names(model)
        pack_all(model, config.plan(model, () if self.pre_quantized else absent(model, tensors)), parts)

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return not self.pre_quantized and packed_weight(model, param_name)[1] is not None

    def get_quantize_ops(self):
        return Quantize()

    def check_part(self, module, weight, part, sources):
        if self.pre_quantized:
            super().check_part(module, weight, part, sources)
            if part == module.packing[weight][-1] and FORMATS[module.format_of(weight)].is_affine:
                of_scale = module.parts(weight)[1].dtype
                offset = next(iter(sources))
                offset.expect(SAFETENSORS[offset.dtype] == of_scale, f"the scale's {of_scale}")
        else:
            *experts, N, C = dense_shape(module, weight)
            sources.expect([(*experts, N, C), (*experts, C, N)] if experts else [(N, C)], FLOATS)

    def conversions(self, weight_conversions, model):
        if self.pre_quantized:  # saved under the model's own names
            return [conversion for conversion in weight_conversions if not isinstance(conversion, WeightConverter)]
        for conversion in weight_conversions:
            if not isinstance(conversion, WeightConverter):
                continue
            given = conversion.operations
            operations = [TransposeToFit(each) if isinstance(each, Transpose) else each for each in given]
            plain = all(isinstance(operation, MergeModulelist | Concatenate) for operation in operations)
            if merges_experts(conversion) and plain:
                operations = [QuantizeApart(operations)]
            conversion.operations = operations
        return weight_conversions

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        model._weight_conversions = []  # packed weights are saved under the model's own names


class Quantize(ConversionOps):
    """Packs a loaded dense weight in the format of the module's packed one."""

    def convert(self, input_dict, model=None, **kwargs):
        name, tensor = next(iter(input_dict.items()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if len(input_dict) > 1 or not tensor.is_floating_point():  # QuantizeApart has packed it
            return input_dict
        return quantized(model, name, tensor)


class QuantizeApart(ConversionOps):
    """Packs each expert's weight before they are merged, so that only one expert is dense at a time."""

    def __init__(self, operations: list[ConversionOps]):
        self.operations = operations

    def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
        module, weight = packed_weight(model, full_layer_name)
        # A block of several rows may contain both gate and up rows.
        if weight is None or FORMATS[module.format_of(weight)].rows_per_scale > 1:
            return merged(self.operations, input_dict, model=model, full_layer_name=full_layer_name, **kwargs)
        apart = {part: {} for part in module.packing[weight]}
        for source in list(input_dict):
            for dense in pop_each(input_dict.pop(source)):
                for part, tensor in quantize_like(module, weight, dense).items():
                    apart[part].setdefault(source, []).append(tensor)
        parts = {part: next(iter(merged(self.operations, apart.pop(part), **kwargs).values())) for part in list(apart)}
        return full_tensor_names(model, full_layer_name, parts)


class TransposeToFit(Transpose):
    """transformers' `Transpose`, which may check the dense weight's shape, for a weight that is packed now."""

    def __init__(self, stock: Transpose):
        super().__init__(stock.dim0, stock.dim1, stock.check_dims)

    def convert(self, input_dict, model=None, full_layer_name=None, **kwargs):
        module, weight = packed_weight(model, full_layer_name)
        if weight is None or not self.check_dims:
            return super().convert(input_dict, model=model, full_layer_name=full_layer_name, **kwargs)
        ((name, tensor),) = input_dict.items()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        fits = tensor.shape[-2:] == (module.parts(weight)[0].shape[-2], columns_of(module, weight))
        return {name: tensor if fits else tensor.transpose(self.dim0, self.dim1)}


def pop_each(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yields each tensor after removing it from the list, so that its memory can be freed."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def quantized(model: nn.Module, name: str, dense: Tensor) -> dict[str, Tensor]:
    module, weight = packed_weight(model, name)
    dense = dense.mT if getattr(module, "is_transposed", False) else dense
    return full_tensor_names(model, name, quantize_like(module, weight, dense))


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING[NAME] = MoeMetal
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = MoeMetalConfig
