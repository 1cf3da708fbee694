"""Builds the tiny models that the families' records describe, with random weights large enough that errors are visible.
The tests use them, and the check of versions of transformers that are newer than the tests (`family_check.py`)."""

import torch
import transformers

from .families import FAMILIES

#: The sizes of all tiny models; a family's record has the differences.
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

#: The differences from COMMON, by family.
CONFIGS = {name: family.tiny for name, family in FAMILIES.items() if family.tiny is not None}

OCR = {
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
}


def build(family: str, **changes) -> torch.nn.Module:
    text = COMMON | CONFIGS[family] | changes
    if family == "qwen3_vl_moe":
        config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=VISION, **MEDIA_TOKENS)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    if family == "qwen3_omni_moe_thinker":
        config = transformers.Qwen3OmniMoeThinkerConfig(
            text_config=text, vision_config=VISION, audio_config=AUDIO, **MEDIA_TOKENS
        )
        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    if family in ("deepseek_ocr2", "unlimited_ocr"):
        sizes = {"text_config": text, "vision_config": OCR_VISION, "image_token_id": MEDIA_TOKENS["image_token_id"]}
        return getattr(transformers, OCR[family])(transformers.AutoConfig.for_model(family, **sizes))
    if family == "mistral4":  # AutoModelForCausalLM does not know it
        return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**text))
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **text))


def with_layers(family: str, layers: int) -> dict[str, object]:
    """Changes of the family's sizes for another number of layers. Lists have an item for each layer, and repeat."""
    lists = {name: (value * layers)[:layers] for name, value in CONFIGS[family].items() if isinstance(value, list)}
    return lists | {"num_hidden_layers": layers}


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
