"""Tiny mixers with a recurrent state, one of each class that `patch` fuses."""

import importlib
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_moe_metal.transformers.versions import cache_argument

H = 64
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
CHANNEL_DELTA = {
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "time_step_min": 0.3,
}


@dataclass(frozen=True)
class Mixer:
    folder: str
    config: str
    name: str
    sizes: dict = field(default_factory=dict)
    ops: int = 3  # of one token, without the norms around it: two projections, and ours


MIXERS = {
    "qwen3_next": Mixer("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet", DELTA_NET),
    "qwen3_5": Mixer("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet", DELTA_NET),
    "lara_mini": Mixer("lara_mini", "LaraMiniConfig", "LaraMiniGatedDeltaNet", DELTA_NET),
    "qwen4_exp": Mixer("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", DELTA_NET),
    "qwen4_exp sigmoid": Mixer(
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpTextGatedDeltaNet",
        DELTA_NET | {"output_gate_type": "sigmoid"},
    ),
    "kimi_linear": Mixer("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", CHANNEL_DELTA, 5),
    "bailing": Mixer("bailing_hybrid", "BailingHybridConfig", "BailingHybridDeltaAttention", CHANNEL_DELTA),
    "bailing softplus": Mixer(
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridDeltaAttention",
        CHANNEL_DELTA | {"kda_safe_gate": False},
    ),
    "glm5_next": Mixer("glm5_next", "Glm5NextTextConfig", "Glm5NextTextLinearAttention", CHANNEL_DELTA, 5),
    "nemotron_h": Mixer("nemotron_h", "NemotronHConfig", "NemotronHMamba2Mixer", NEMOTRON),
    "granite": Mixer(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridMambaLayer",
        {"mamba_n_heads": 8, "mamba_d_state": 24, "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
    ),
    "lfm2_moe": Mixer(
        "lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeShortConv", {"layer_types": ["conv"] * 2, "num_hidden_layers": 2}
    ),
}
MIXERS = {name: mixer for name, mixer in MIXERS.items() if mixer.folder in CONFIG_MAPPING}
#: Mamba 2's steps in drafts are those of single tokens, and in transformers those of prompts.
WITH_STATE = [name for name in MIXERS if name != "lfm2_moe"]


def tiny_mixer(name: str, device: str = "cpu") -> tuple[nn.Module, object]:
    """Random weights that are large enough to make errors visible, and the configuration."""
    mixer = MIXERS[name]
    home = f"transformers.models.{mixer.folder}"
    config = getattr(importlib.import_module(f"{home}.configuration_{mixer.folder}"), mixer.config)
    config = config(hidden_size=H, **mixer.sizes)
    kind = "conv" if "conv" in config.layer_types else "linear_attention"
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"{home}.modeling_{mixer.folder}"), mixer.name)
    layer = cls(config, config.layer_types.index(kind)).float().eval().requires_grad_(False)
    for name, parameter in layer.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() < 2 or "conv" in name else 0.15))
        if "norm" in name:
            parameter += 1
    return layer.to(device), config


def cache_for(config) -> DynamicCache:
    return DynamicCache(config=config)


def call(layer: nn.Module, x: torch.Tensor, cache, mask: torch.Tensor | None = None, **more) -> torch.Tensor:
    cls = getattr(layer, "original", type(layer))
    return layer(x, **{cache_argument(cls): cache}, attention_mask=mask, **more)
