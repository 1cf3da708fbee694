"""The tiny models of the package, and what the tests expect of them; tiny modules of every class."""

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import CONFIG_MAPPING

from torch_moe_metal.transformers import Report
from torch_moe_metal.transformers.fusing.hybrid_families import RECURRENT
from torch_moe_metal.transformers.fusing.tiny_models import COMMON, CONFIGS, build, eager, randomised, tiny_model

__all__ = ["COMMON", "CONFIGS", "build", "eager", "randomised", "tiny_model"]

VOCABULARY = 89

# The number of modules of each family that `patch` fuses: blocks, attention, layers and the last norm.
FAMILIES = {
    "qwen2_moe": 7,
    "qwen3_moe": 7,
    "qwen3_vl_moe": 7,
    "qwen3_omni_moe_thinker": 7,
    "qwen3_next": 7,
    "qwen3_5_moe_text": 7,
    "mixtral": 7,
    "olmoe": 7,
    "gemma4_text": 5,
    "gpt_oss": 7,
    "deepseek_v2": 6,
    "deepseek_v3": 6,
    "glm4_moe": 6,
    "glm4_moe_lite": 6,
    "granitemoe": 4,
    "minimax_m2": 7,
    "llama4_text": 4,
}

# Families with the code of a family above, under other names, in the versions of transformers that have them.
SAME_CODE = {
    "mellum": 7,
    "dots1": 6,
    "solar_open": 7,
    "mimo_v2_flash": 6,
    "mistral4": 6,
    "hunyuan_v1_moe": 7,
    "hy_v3": 6,
    "laguna": 6,
    "flint": 7,
    "jamba": 2,
    "kimi_linear": 6,
    "bailing_hybrid": 6,
    "flex_olmo": 4,
    "granitemoe_swa": 4,
    "granitemoehybrid": 7,
    "granitemoeshared": 4,
    "deepseek_ocr2": 3,
    "unlimited_ocr": 3,
    "lara_mini": 10,
    "lfm2_moe": 7,
    "sarvam_moe": 6,
    "sarvam_mla": 6,
}
SAME_CODE = {family: fused for family, fused in SAME_CODE.items() if family in CONFIG_MAPPING}


def tokens(*shape: int, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, shape, generator=generator).to(device)


def left_without_need(report: Report) -> list[str]:
    """The modules that `patch` left, except those with a recurrent state."""
    return [row.name for row in report.rows if row.state == "left" and row.note != RECURRENT]


# A configuration that is sufficient for any class of experts or MoE block of transformers.
TINY_CONFIG = SimpleNamespace(
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 40),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor"), 2.5),
    num_experts_per_tok=3,
    moe_topk=[3],
    shared_experts_intermediate_size=40,
    norm_topk_prob=False,
    n_group=4,
    topk_group=2,
    topk_method="group_limited_greedy",
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    mlp_hidden_act="relu2",
    mlp_bias=False,
    moe_latent_size=None,
    moe_router_logit_softcapping=3.0,
    mlp_gate_softcap=10.0,
    mlp_up_softcap=10.0,
    post_norm_eps=1e-6,
    router_jitter_noise=0.0,
    enable_moe_fp32_combine=False,
    swiglu_alpha=1.702,
    swiglu_limit=1.0,
    use_expert_bias=True,
    _experts_implementation="eager",
)


def tiny_module(cls: type, **changes) -> torch.nn.Module:
    """An experts class or block of transformers with random weights."""
    torch.manual_seed(0)
    config = SimpleNamespace(**vars(TINY_CONFIG) | changes)
    layer = {"layer_idx": 0} if "layer_idx" in inspect.signature(cls.__init__).parameters else {}
    module = cls(config, **layer).eval().requires_grad_(False)
    for tensor in [*module.parameters(), *module.buffers()]:
        torch.nn.init.normal_(tensor, std=0.3)
    return module


def experts_classes() -> list[type]:
    """Every class on the experts interface of the installed transformers."""
    classes = []
    for file in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        names = re.findall(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)", file.read_text(), re.M)
        if names:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            classes += [getattr(module, name) for name in names]
    return classes
