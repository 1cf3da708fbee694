"""transformers' own `MetalConfig`: checkpoints saved with it, and dense ones that it packs while they load.

It packs only linear layers, by its own rule, in MLX's layout. transformers runs them with a kernel from the hub; here
they run on our `linear`. Experts stay dense; `MoeMetalConfig` packs them too.
"""

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.quantizer_metal import MetalHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...formats import GROUPS
from ..fusing.packed_modules import Parts, columns_of, pack
from .checkpoint import FLOATS, SAFETENSORS, SCALES, Stored
from .conversions import merges_experts, packed_weight
from .mlx_conversions import FromWords, kind_of
from .patterns import expect_bounded
from .quantizer import PackedQuantizer, absent, as_stored, packs, runs_here
from .sources import Sources

NAMES = ("weight", "scales", "qbiases")  # of data, scale and offset


class Quantize(ConversionOps):
    """transformers' own quantisation, with its data as bytes."""

    def __init__(self, quantizer: "Metal"):
        from transformers.integrations.metal_quantization import MetalQuantize  # which may be importing us

        self.stock = MetalQuantize(quantizer)

    def convert(self, input_dict, **kwargs):
        found = self.stock.convert(input_dict, **kwargs)
        return {name: part.view(torch.uint8) if part.dtype == torch.uint32 else part for name, part in found.items()}


class Metal(PackedQuantizer, MetalHfQuantizer):
    """`weight` [N, C * bits / 32] in uint32, `scales` and `qbiases` [N, C / group] of linear layers."""

    kind = "metal"
    stock = MetalHfQuantizer

    def serves(self, device_map) -> bool:
        config = self.quantization_config
        known = config.group_size in GROUPS and not config.dequantize
        return known and runs_here(device_map) and packs(self.kind)

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        config = self.quantization_config
        for name in ("bits", "group_size"):
            if type(getattr(config, name)) is not int:
                raise ValueError(f"torch_moe_metal: {name}: expected an integer, got {getattr(config, name)!r}")
        if self.pre_quantized and self.serves(device_map):
            expect_bounded(config.modules_to_not_convert)
        super().validate_environment(*args, device_map=device_map, **kwargs)

    def update_device_map(self, device_map):
        """transformers' own choice of mps, if it is available."""
        return super().update_device_map(device_map) if torch.backends.mps.is_available() else device_map

    def select_modules(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The linear layers that the configuration does not skip."""
        skipped = self.quantization_config.modules_to_not_convert
        skipped = self.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        return {name: module for name, module in linear.items() if should_convert_module(name, skipped)}

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        kinds = {name: type(module) for name, module in self.select_modules(model).items()}
        others = [f"{name} is a {kind.__name__}" for name, kind in kinds.items() if kind is not nn.Linear]
        reason = next(iter(others), None) or super().obstacle(model, tensors)
        if reason is not None and not self.pre_quantized:  # a dense checkpoint has no fallback
            raise ValueError(f"torch_moe_metal: cannot pack {model.config.name_or_path}: {reason}")
        return reason

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        config, left, selected = self.quantization_config, absent(model, tensors), self.select_modules(model)
        self.kinds = {kind_of(name) for name in selected}

        def parts(name: str, dense: Tensor) -> Parts:
            (N, C), module = dense.shape, name.rpartition(".")[0]
            if C % config.group_size:
                raise ValueError(
                    f"torch_moe_metal: {name}: expected a multiple of {config.group_size} columns, its group_size, "
                    f"got {C}; modules_to_not_convert=[{module!r}] leaves it dense"
                )
            sizes = (C * config.bits // 8, *[C // config.group_size] * 2)
            dtypes = (torch.uint8, dense.dtype, dense.dtype)
            found = [
                torch.empty(N, size, dtype=dtype, device="meta") for size, dtype in zip(sizes, dtypes, strict=True)
            ]
            scales = dict(zip(NAMES[1:], found[1:], strict=True))
            return {NAMES[0]: found[0]} | (as_stored(model, tensors, module, scales) if self.pre_quantized else scales)

        for name in selected:
            if name not in left:
                pack(model, name, "affine", parts)

    def conversions(self, weight_conversions, model):
        words = [WeightConverter([rf"{kind}\.weight"], [rf"{kind}\.weight"], [FromWords()]) for kind in self.kinds]
        return [*words, *weight_conversions]

    def check(self, model: nn.Module, sources: dict[str, Sources]) -> None:
        super().check(model, sources)
        known = model.state_dict()
        for key, given in sources.items():
            if given.converter is not None and joins_experts(given.converter):
                given.expect([tuple(known[key].shape)], FLOATS)

    def check_part(self, module: nn.Linear, weight: str, part: str, sources: Sources) -> None:
        (N, columns), first = module._buffers[part].shape, next(iter(sources))
        if not self.pre_quantized:
            sources.expect([(N, columns_of(module, weight))], FLOATS)
        elif part == NAMES[0]:
            sources.expect([(N, columns // 4)], ("U32",))
        else:
            sources.expect([(N, columns)], SCALES)
            of_scales = module._buffers[NAMES[1]].dtype
            first.expect(SAFETENSORS[first.dtype] == of_scales, f"the scales' {of_scales}")

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return not self.pre_quantized and packed_weight(model, param_name)[1] is not None

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)


def joins_experts(conversion: WeightConverter) -> bool:
    """Whether it merges single experts' dense weights without changing them."""
    plain = all(isinstance(operation, MergeModulelist | Concatenate) for operation in conversion.operations)
    return plain and merges_experts(conversion)


def register() -> None:
    auto.AUTO_QUANTIZER_MAPPING["metal"] = Metal
