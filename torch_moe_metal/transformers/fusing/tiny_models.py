"""A tiny random model of every family that `patch` fuses, with weights large enough that errors are visible. The tests
use them, and the check of versions of transformers that are newer than the tests (`self_check.py`)."""

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

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
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LINEAR_ATTENTION = DELTA_NET | {"layer_types": ["linear_attention", "full_attention"]}
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
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
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

# Differences from COMMON.
CONFIGS = {
    "qwen2_moe": QWEN_SHARED | {"norm_topk_prob": False},
    "qwen3_moe": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_omni_moe_thinker": QWEN,
    "qwen3_next": QWEN_SHARED | LINEAR_ATTENTION,
    "qwen3_5_moe_text": QWEN_SHARED | LINEAR_ATTENTION,
    "mixtral": LOCAL,
    "olmoe": {"num_experts": 8},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **WINDOW,
    },
    "gpt_oss": LOCAL,
    "deepseek_v2": LATENT_ATTENTION | GROUPS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT_ATTENTION | GROUPS,
    "glm4_moe": GROUPS,
    "glm4_moe_lite": LATENT_ATTENTION | GROUPS,
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL | {"rotary_dim": 8},
    "llama4_text": LOCAL
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
    },
    # Families with the code of a family above, under other names.
    "mellum": QWEN | WINDOW,
    "dots1": GROUPS | WINDOW,
    "solar_open": GROUPS,
    "mimo_v2_flash": GROUPS | {"v_head_dim": 8, "attention_value_scale": 0.7} | WINDOW,
    "mistral4": LATENT_ATTENTION | GROUPS | {"rope_parameters": YARN},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": [3, 3]},
    "hy_v3": {"num_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "laguna": {"num_experts": 8},
    "flint": QWEN_SHARED | WINDOW | {"mlp_only_layers": []},
    "jamba": QWEN | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": LATENT_ATTENTION | GROUPS | DELTA_ATTENTION,
    "bailing_hybrid": LATENT_ATTENTION | GROUPS | DELTA_ATTENTION,
    "flex_olmo": {"num_experts": 8},
    "granitemoe_swa": LOCAL | WINDOW,
    "granitemoehybrid": LOCAL | {"layer_types": ["attention"] * 2, "shared_intermediate_size": 32},
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 32},
    "deepseek_ocr2": OCR_TEXT,
    "unlimited_ocr": OCR_TEXT | {"layer_types": ["reference_sliding_attention", "full_attention"], "sliding_window": 6},
    "lara_mini": QWEN_SHARED
    | DELTA_NET
    | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "sarvam_moe": GROUPS,
    "sarvam_mla": LATENT_ATTENTION | GROUPS,
    # Families of which only the blocks are fused, or some layers.
    "minimax": LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "minimax_m3_vl_text": LOCAL | {"shared_intermediate_size": 32},
    "glm_moe_dsa": LATENT_ATTENTION | GROUPS | INDEXER,
    "dots3_note_text": LATENT_ATTENTION | GROUPS,
    "hy_v4": LATENT_ATTENTION | GROUPS,
}

OCR = {
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
}


def build(family: str, **changes) -> torch.nn.Module:
    text = COMMON | CONFIGS[family] | changes
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


def eager(model: torch.nn.Module) -> torch.nn.Module:
    """The model with transformers' own loop over experts. Llama 4 has no such choice and does not change."""
    if model._can_set_experts_implementation() or hasattr(model.config, "text_config"):
        model.set_experts_implementation("eager")
    return model
