"""Quantised checkpoints in `from_pretrained`, run as they are on disk: transformers' quantizers, with packed weights.

On cuda and xpu, and where the user asks for dequantised weights, transformers' own quantizers do what they always did.
"""

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from .checkpoint import Stored, check_mxfp4, stored_tensors
from .experts import DEVICES, NAME
from .packed import PROJECTIONS, pack_experts, packed_modules, packed_names, weight_shape
from .patch import is_experts


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
        self.pack(model, stored_tensors(checkpoint_files))

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


def expected_in(model: nn.Module, tensors: dict[str, Stored], name: str, like: Tensor) -> None:
    """That a stored tensor has the shape which the model's sizes ask for."""
    prefix = f"{model.base_model_prefix}."
    stored = tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)
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


def register() -> None:
    """Have these in the places of transformers' own."""
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = Mxfp4
