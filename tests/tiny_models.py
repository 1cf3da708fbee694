"""A tiny random model of every family that `patch` fuses, with weights large enough that errors are visible."""

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from torch_moe_metal.transformers import Report
from torch_moe_metal.transformers.fusing.families import RECURRENT

VOCABULARY = 89
COMMON = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 98,
    "pad_token_id": 0,
}
LOCAL = {"num_local_experts": 8}
QWEN = {"num_experts": 8, "norm_topk_prob": True}
QWEN_SHARED = QWEN | {"shared_expert_intermediate_size": 40}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT_ATTENTION = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "num_mel_bins": 16,
    "downsample_hidden_size": 8,
}
MEDIA_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "audio_token_id": 94,
}

OCR_TEXT = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
OCR_VISION = {
    "sam_config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "window_size": 2,
        "global_attn_indexes": [0],
        "mlp_dim": 32,
        "downsample_channels": [16, 32],
    },
    "encoder_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
    },
}

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

DELTA_ATTENTION = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "partial_rotary_factor": 1.0,
}

# Differences from COMMON, and the number of modules that `patch` fuses: blocks, attention, layers and the last norm.
FAMILIES = {
    "qwen2_moe": (QWEN_SHARED | {"norm_topk_prob": False}, 7),
    "qwen3_moe": (QWEN, 7),
    "qwen3_vl_moe": (QWEN, 7),
    "qwen3_omni_moe_thinker": (QWEN, 7),
    "qwen3_next": (QWEN_SHARED | LINEAR_ATTENTION, 3),
    "qwen3_5_moe_text": (QWEN_SHARED | LINEAR_ATTENTION, 3),
    "mixtral": (LOCAL, 7),
    "olmoe": ({"num_experts": 8}, 7),
    "gemma4_text": (
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            **WINDOW,
        },
        5,
    ),
    "gpt_oss": (LOCAL, 7),
    "deepseek_v2": (LATENT_ATTENTION | GROUPS | {"topk_method": "group_limited_greedy"}, 5),
    "deepseek_v3": (LATENT_ATTENTION | GROUPS, 5),
    "glm4_moe": (GROUPS, 5),
    "glm4_moe_lite": (LATENT_ATTENTION | GROUPS, 5),
    "granitemoe": (LOCAL, 4),
    "minimax_m2": (LOCAL | {"rotary_dim": 8}, 7),
    "llama4_text": (
        LOCAL
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
        },
        4,
    ),
}

# Families with the code of a family above, under other names.
SAME_CODE = {
    "mellum": (QWEN | WINDOW, 7),
    "dots1": (GROUPS | WINDOW, 5),
    "solar_open": (GROUPS, 7),
    "mimo_v2_flash": (GROUPS | {"v_head_dim": 8, "attention_value_scale": 0.7} | WINDOW, 5),
    "mistral4": (LATENT_ATTENTION | GROUPS | {"rope_parameters": YARN}, 5),
    "hunyuan_v1_moe": ({"num_experts": 8, "moe_topk": [3, 3]}, 7),
    "hy_v3": ({"num_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1}, 5),
    "laguna": ({"num_experts": 8}, 5),
    "flint": (QWEN_SHARED | WINDOW | {"mlp_only_layers": []}, 7),
    "jamba": (QWEN | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, 2),
    "kimi_linear": (LATENT_ATTENTION | GROUPS | DELTA_ATTENTION, 2),
    "bailing_hybrid": (LATENT_ATTENTION | GROUPS | DELTA_ATTENTION, 2),
    "flex_olmo": ({"num_experts": 8}, 4),
    "granitemoe_swa": (LOCAL | WINDOW, 4),
    "granitemoehybrid": (LOCAL | {"layer_types": ["attention"] * 2, "shared_intermediate_size": 32}, 4),
    "granitemoeshared": (LOCAL | {"shared_intermediate_size": 32}, 4),
    "deepseek_ocr2": (OCR_TEXT, 3),
    "unlimited_ocr": (
        OCR_TEXT | {"layer_types": ["reference_sliding_attention", "full_attention"], "sliding_window": 6},
        3,
    ),
}

OCR = {
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
}


def build(family: str, **changes) -> torch.nn.Module:
    text = COMMON | (FAMILIES | SAME_CODE)[family][0] | changes
    if family == "qwen3_vl_moe":
        config = AutoConfig.for_model(family, text_config=text, vision_config=VISION, **MEDIA_TOKENS)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    if family == "qwen3_omni_moe_thinker":
        config = transformers.Qwen3OmniMoeThinkerConfig(
            text_config=text, vision_config=VISION, audio_config=AUDIO, **MEDIA_TOKENS
        )
        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    if family in ("deepseek_ocr2", "unlimited_ocr"):
        sizes = {"text_config": text, "vision_config": OCR_VISION, "image_token_id": MEDIA_TOKENS["image_token_id"]}
        return getattr(transformers, OCR[family])(AutoConfig.for_model(family, **sizes))
    if family == "mistral4":  # AutoModelForCausalLM does not know it
        return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**text))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text))


def tiny_model(family: str, device: str = "cpu", **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return randomised(build(family, **changes)).to(device)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    model.eval().requires_grad_(False)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() >= 2 and tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.2)
        elif any(word in name for word in ("bias", "scale", "norm", "scalar")):
            tensor += 0.1 * torch.randn_like(tensor)
    return model


def tokens(*shape: int, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, shape, generator=generator).to(device)


def left_without_need(report: Report) -> list[str]:
    """The modules that `patch` left, except those with a recurrent state."""
    return [row.name for row in report.rows if row.state == "left" and row.note != RECURRENT]


def eager(model: torch.nn.Module) -> torch.nn.Module:
    """The model with transformers' own loop over experts. Llama 4 has no such choice and does not change."""
    if model._can_set_experts_implementation() or hasattr(model.config, "text_config"):
        model.set_experts_implementation("eager")
    return model


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
