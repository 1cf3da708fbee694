"""FP8 checkpoints with a scale per block of 128 x 128, which stay packed."""

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...ggml import power_of_two
from ...packing import FP8_BLOCK
from ..fusing.experts import is_experts, why_not_packed
from ..fusing.packed_modules import Parts, empty_parts, pack, weight_shape
from .checkpoint import POWERS, Stored, check_fp8
from .conversions import AsBytes, AsFloats, merges_experts, of_each
from .patterns import expect_bounded
from .quantizer import PackedQuantizer, absent, as_stored, find_tensor


class FromPowers(ConversionOps):
    """Converts scales from e8m0 to float32, by their bytes: not every device supports PyTorch's e8m0."""

    def __init__(self, quantizer: HfQuantizer):
        self.hf_quantizer = quantizer  # so that transformers does not cast them

    def convert(self, input_dict, **kwargs):
        return of_each(input_dict, self.convert_scales)

    def convert_scales(self, scales: Tensor) -> Tensor:
        codes = scales.view(torch.uint8)
        return power_of_two(codes, 127).masked_fill(codes == 255, float("nan"))

    @property
    def reverse_op(self) -> ConversionOps:
        return ToPowers(self.hf_quantizer)


class ToPowers(FromPowers):
    def convert_scales(self, scales: Tensor) -> Tensor:
        exponents = scales.contiguous().view(torch.int32) >> 23 & 255
        return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)

    @property
    def reverse_op(self) -> ConversionOps:
        return FromPowers(self.hf_quantizer)


class Fp8(PackedQuantizer, FineGrainedFP8HfQuantizer):
    """Blocks of 128 x 128 with a scale: `weight` and `weight_scale_inv` of linear layers, `gate_up_proj` and
    `gate_up_proj_scale_inv` of experts, which transformers merges from those of single experts while loading.

    With "ue8m0" in the configuration, scales are powers of two of one byte each (DeepSeek V4), or float32 and not
    always powers of two (DeepSeek V3.1)."""

    kind = "fp8"
    stock = FineGrainedFP8HfQuantizer
    scales: frozenset[str] = frozenset()  # their dtypes, by safetensors' names

    def serves(self, device_map) -> bool:
        config = self.quantization_config
        blocks = list(config.weight_block_size or ()) == [FP8_BLOCK, FP8_BLOCK]
        known = blocks and (config.expert_dtype, config.activation_scheme) == ("fp8", "dynamic")
        return known and not config.modules_to_convert and super().serves(device_map)

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if self.serves(device_map):
            expect_bounded(self.quantization_config.modules_to_not_convert)
        super().validate_environment(*args, device_map=device_map, **kwargs)

    def select_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linear layers and experts that the configuration does not skip."""
        config = self.quantization_config
        skipped = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        return {
            name: module
            for name, module in model.named_modules()
            if (is_experts(module) or isinstance(module, nn.Linear)) and should_convert_module(name, skipped)
        }

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        self.scales = frozenset(check_fp8(tensors))
        self._normalize_modules_to_not_convert(model)
        for name, module in self.select_modules(model).items():
            if is_experts(module):
                reason = why_not_packed(module)
                if reason is None and weight_shape(module, "down")[2] % FP8_BLOCK:
                    reason = f"its up rows do not begin with a block of {FP8_BLOCK}"
                if reason is not None:
                    return f"{name} cannot be packed: {reason}"
            elif type(module) is not nn.Linear:
                return f"{name} is a {type(module).__name__}"
        return super().obstacle(model, tensors)

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        dtype = torch.bfloat16 if self.scales == {"BF16"} else torch.float32

        def parts(name: str, dense: Tensor) -> Parts:
            module, _, name = name.rpartition(".")
            data, scale = empty_parts(name, dense.shape, "fp8", 8, FP8_BLOCK, dtype).values()
            return as_stored(
                model, tensors, module, {name: data.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.to(dtype)}
            )

        left = absent(model, tensors)
        for name, module in self.select_modules(model).items():
            stored = find_tensor(model, tensors, f"{name}.weight")
            if name in left:
                continue
            if is_experts(module) or stored is None or stored.dtype == "F8_E4M3":
                pack(model, name, "fp8", parts)

    def check_part(self, module, weight, part, sources):
        if part == module.packing[weight][1] and POWERS in self.scales:
            sources.expect([tuple(module._buffers[part].shape)], (POWERS,))
        else:
            super().check_part(module, weight, part, sources)

    def conversions(self, weight_conversions, model):
        """Merges experts' weights as bytes, and their scales in the same way."""
        updated = super(PackedQuantizer, self).update_weight_conversions([], model)  # renames scales
        numbers = [FromPowers(self)] if POWERS in self.scales else []
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and merges_experts(conversion):
                sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
                scales = ([f"{name}_scale_inv" for name in names] for names in (sources, targets))
                updated.append(conversion.copy(*scales, operations=[*numbers, *conversion.operations]))
                conversion.operations = [AsBytes(), *conversion.operations, AsFloats()]
            updated.append(conversion)
        if numbers:
            updated.append(WeightConverter(".weight_scale_inv", ".weight_scale_inv", numbers))
        return updated


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING["fp8"] = Fp8
