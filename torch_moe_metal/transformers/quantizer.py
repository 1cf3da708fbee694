"""Quantised checkpoints in `from_pretrained`, run as they are on disk: transformers' quantizers, with packed weights.

On cuda and xpu, and where the user asks for dequantised weights, transformers' own quantizers do what they always did.
"""

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ..layers import Linear
from ..packing import FP8_BLOCK
from .checkpoint import Stored, check_fp8, check_mxfp4, stored_tensors
from .experts import DEVICES, NAME, why_not_packed
from .packed import PROJECTIONS, pack_experts, packed_modules, packed_names, replace, weight_shape
from .patch import is_experts

logger = logging.get_logger(__name__)


def runs_here(device_map) -> bool:
    """Whether a model with this device map lies where our ops run."""
    if device_map is None:
        return not (torch.cuda.is_available() or torch.xpu.is_available())  # it may be meant to be moved there
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return all(device_type(place) in DEVICES for place in places)


def device_type(place) -> str:
    """Of an entry of a device map: a device, its name, the number of one, or a way to choose ("auto")."""
    if isinstance(place, str) and place in ("auto", "balanced", "balanced_low_0", "sequential"):
        place = 0
    if isinstance(place, int):
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None else "cpu"
    return "cpu" if place == "disk" else torch.device(place).type


class PackedQuantizer(HfQuantizer):
    """What our quantizers share. A subclass says which modules get which packed weights, on the meta device and by the
    names that the checkpoint has for their parts; the rest is transformers' ordinary loading."""

    stock: type | None = None  # transformers' own quantizer of this method, which takes over elsewhere
    is_trainable = True  # gradients pass through packed weights
    is_compileable = True

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        """Have packed weights on the meta device, as they are stored."""
        raise NotImplementedError

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        """What of this model cannot be packed, so that transformers has to dequantise it."""
        return None

    def serves(self, device_map) -> bool:
        return not getattr(self.quantization_config, "dequantize", False) and runs_here(device_map)

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        if self.stock is not None and not self.serves(device_map):
            self.__class__ = self.stock
            self.validate_environment(*args, device_map=device_map, **kwargs)

    def update_attn_implementation(self, config):
        """The first that a quantizer sees of the configuration, so it is also where our experts are selected."""
        if config._experts_implementation is None:
            config._experts_implementation = NAME
        return config

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        tensors = stored_tensors(checkpoint_files)
        obstacle = self.obstacle(model, tensors)
        if obstacle is None:
            return self.pack(model, tensors)
        logger.warning(f"torch_moe_metal: transformers dequantises this checkpoint, since {obstacle}")
        self.__class__ = self.stock
        self.quantization_config.dequantize = True
        return self._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)

    def update_weight_conversions(self, weight_conversions, model):
        return weight_conversions

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return False

    def _process_model_after_weight_loading(self, model, **kwargs):
        missing = [
            f"{name}.{part}"
            for name, module in packed_modules(model)
            for part in sorted(packed_names(module))
            if not getattr(module._buffers[part], "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(f"torch_moe_metal: {model.config.name_or_path}: missing: {', '.join(missing)}")

    def get_state_dict_and_metadata(self, model):
        return None, {}

    def is_serializable(self) -> bool:
        return True

    def _dequantize(self, model, dtype=None):
        raise NotImplementedError


def find(model: nn.Module, tensors: dict[str, Stored], name: str) -> Stored | None:
    """What is stored under a model's name for it, with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)


def expected_in(model: nn.Module, tensors: dict[str, Stored], name: str, like: Tensor) -> None:
    """That a stored tensor has the shape which the model's sizes ask for."""
    stored = find(model, tensors, name)
    if stored is not None:
        stored.expect(stored.shape == tuple(like.shape), f"shape {list(like.shape)}, by the model's configuration")


class Mxfp4(PackedQuantizer, Mxfp4HfQuantizer):
    """gpt-oss: experts `gate_up_proj_blocks` [E, 2I, H / 32, 16], `gate_up_proj_scales` [E, 2I, H / 32], and so on."""

    stock = Mxfp4HfQuantizer

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        check_mxfp4(tensors)
        for name, experts in list(model.named_modules()):
            if is_experts(experts):
                weights = {weight: self.parts(experts, weight) for weight in PROJECTIONS}
                pack_experts(experts, "mxfp4", weights)
                for part, tensor in experts.named_buffers():
                    expected_in(model, tensors, f"{name}.{part}", tensor)

    def parts(self, experts: nn.Module, weight: str) -> dict[str, Tensor]:
        E, N, C = weight_shape(experts, weight)
        options = {"dtype": torch.uint8, "device": "meta"}
        sizes = {"blocks": (E, N, C // 32, 16), "scales": (E, N, C // 32)}
        return {f"{PROJECTIONS[weight]}_{part}": torch.empty(size, **options) for part, size in sizes.items()}


# ------------------------------------------------------------------------------------------------ FP8


class AsBytes(ConversionOps):
    """float8 as uint8, which every device can stack and join."""

    dtypes = (torch.float8_e4m3fn, torch.uint8)

    def convert(self, input_dict, **kwargs):
        before, after = self.dtypes

        def viewed(tensor: Tensor) -> Tensor:
            return tensor.view(after) if tensor.dtype == before else tensor

        return {
            name: [viewed(tensor) for tensor in given] if isinstance(given, list) else viewed(given)
            for name, given in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return AsFloats()


class AsFloats(AsBytes):
    dtypes = (torch.uint8, torch.float8_e4m3fn)

    @property
    def reverse_op(self) -> ConversionOps:
        return AsBytes()


class Fp8(PackedQuantizer, FineGrainedFP8HfQuantizer):
    """Blocks of 128 x 128 with a scale: `weight` and `weight_scale_inv` of linear layers, `gate_up_proj` and
    `gate_up_proj_scale_inv` of experts, which transformers merges out of the single experts' while it loads."""

    stock = FineGrainedFP8HfQuantizer

    def serves(self, device_map) -> bool:
        config = self.quantization_config
        blocks = list(config.weight_block_size or ()) == [FP8_BLOCK, FP8_BLOCK]
        known = blocks and (config.scale_fmt, config.expert_dtype, config.activation_scheme) == (
            "float",
            "fp8",
            "dynamic",
        )
        return self.pre_quantized and known and not config.modules_to_convert and super().serves(device_map)

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        """The linear layers and experts that its configuration does not skip."""
        config = self.quantization_config
        skipped = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        return {
            name: module
            for name, module in model.named_modules()
            if (is_experts(module) or isinstance(module, nn.Linear)) and should_convert_module(name, skipped)
        }

    def obstacle(self, model: nn.Module, tensors: dict[str, Stored]) -> str | None:
        check_fp8(tensors)
        self._normalize_modules_to_not_convert(model)
        for name, module in self.chosen(model).items():
            if is_experts(module):
                reason = why_not_packed(module)
                if reason is None and weight_shape(module, "down")[2] % FP8_BLOCK:
                    reason = f"its up rows do not begin with a block of {FP8_BLOCK}"
                if reason is not None:
                    return f"{name} cannot be packed: {reason}"
            elif type(module) is not nn.Linear:
                return f"{name} is a {type(module).__name__}"
        return None

    def pack(self, model: nn.Module, tensors: dict[str, Stored]) -> None:
        for name, module in self.chosen(model).items():
            if is_experts(module):
                sizes = {weight: weight_shape(module, weight) for weight in PROJECTIONS}
                weights = {weight: self.parts(PROJECTIONS[weight], size) for weight, size in sizes.items()}
                pack_experts(module, "fp8", weights)
                continue
            stored = find(model, tensors, f"{name}.weight")
            if stored is None or stored.dtype == "F8_E4M3":
                parts = self.parts("weight", module.weight.shape)
                for part, tensor in parts.items():
                    expected_in(model, tensors, f"{name}.{part}", tensor)
                replace(model, name, Linear.from_parts(parts, module.in_features, "fp8", module.bias))

    def parts(self, name: str, size: tuple[int, ...]) -> dict[str, Tensor]:
        blocks = (*size[:-2], *(-(-columns // FP8_BLOCK) for columns in size[-2:]))
        return {
            name: torch.empty(size, dtype=torch.float8_e4m3fn, device="meta"),
            f"{name}_scale_inv": torch.empty(blocks, dtype=torch.float32, device="meta"),
        }

    def update_weight_conversions(self, weight_conversions, model):
        """Experts' weights are merged as bytes, and their scales as their weights are."""
        updated = super(PackedQuantizer, self).update_weight_conversions([], model)  # other names for scales
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and merges_experts(conversion):
                sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
                scales = ([f"{name}_scale_inv" for name in names] for names in (sources, targets))
                updated.append(conversion.copy(*scales, operations=list(conversion.operations)))
                conversion.operations = [AsBytes(), *conversion.operations, AsFloats()]
            updated.append(conversion)
        return updated


def merges_experts(conversion: WeightConverter) -> bool:
    """Whether it makes one weight of all experts out of their single ones."""
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    whole = len(targets) == 1 and targets[0].rpartition(".")[2] in PROJECTIONS.values()
    return whole and all(source.endswith(".weight") for source in sources)


def register() -> None:
    """Have these in the places of transformers' own."""
    auto.AUTO_QUANTIZER_MAPPING |= {"mxfp4": Mxfp4, "fp8": Fp8}
