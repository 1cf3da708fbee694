"""Makes a transformers configuration from a GGUF file's metadata, for architectures that transformers cannot read.

A GGUF file has no config.json: its metadata, under llama.cpp's key names, are the configuration. All values in the file
are set, even if they equal a default of the class, because those defaults are the values of one checkpoint. A key that
an older llama.cpp did not write gets llama.cpp's own default.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .config_parts import attention, decoder, expert_width, experts, no_bias, shared_and_routed, used_experts
from .metadata import LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS, Metadata, is_flag, is_int, rope

__all__ = ["CONFIGS", "LONG_FACTORS", "ROPE_FREQS", "SHORT_FACTORS"]

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of scoring functions

# GGUF architecture -> function of (metadata, tensor names) that returns transformers' configuration as a dict
CONFIGS: dict[str, Callable[[dict, tuple[str, ...]], dict]] = {}


def architecture(name: str, prefix: str | None = None):
    """Registers a function of Metadata that makes the configuration of this GGUF architecture. `prefix` is that of its
    keys."""

    def register(function):
        CONFIGS[name] = lambda metadata, tensor_names: function(Metadata(metadata, prefix or name, tensor_names))
        return function

    return register


@architecture("qwen3moe")
def qwen3_moe(file: Metadata) -> dict:
    return {
        **decoder(file, "qwen3_moe", "Qwen3MoeForCausalLM"),
        **attention(file),
        **experts(file),
        "moe_intermediate_size": expert_width(file, None),
        "norm_topk_prob": file.bool("expert_weights_norm", True),
    }


@architecture("qwen2moe")
def qwen2_moe(file: Metadata) -> dict:
    config = decoder(file, "qwen2_moe", "Qwen2MoeForCausalLM") | attention(file) | experts(file)
    shared = "expert_shared_feed_forward_length"
    return config | {
        "qkv_bias": config.pop("attention_bias"),
        "moe_intermediate_size": expert_width(file, None),
        "shared_expert_intermediate_size": file.int(shared) if file.has(shared) else file.int("feed_forward_length"),
        "norm_topk_prob": file.bool("expert_weights_norm", False),
    }


@architecture("qwen3next")
def qwen3_next(file: Metadata) -> dict:
    value_heads = file.int("ssm.time_step_rank")
    inner = file.int("ssm.inner_size")
    if inner % value_heads:
        raise file.error("ssm.inner_size", f"a multiple of ssm.time_step_rank, which is {value_heads}")
    interval = file.int("full_attention_interval", 4)
    by_interval = [(layer + 1) % interval != 0 for layer in range(file.blocks)]
    linear = file.per_layer("attention.recurrent_layers", by_interval, is_flag)
    shared = "expert_shared_feed_forward_length"
    shape = attention(file)
    shape["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # the class has another default
    return {
        **decoder(file, "qwen3_next", "Qwen3NextForCausalLM"),
        **shape,
        **experts(file),
        "moe_intermediate_size": expert_width(file, None),
        "shared_expert_intermediate_size": file.int(shared) if file.has(shared) else file.int("feed_forward_length"),
        "norm_topk_prob": file.bool("expert_weights_norm", True),
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in linear],
        "linear_conv_kernel_dim": file.int("ssm.conv_kernel"),
        "linear_key_head_dim": file.int("ssm.state_size"),
        "linear_num_key_heads": file.int("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
    }


@architecture("gpt-oss")
def gpt_oss(file: Metadata) -> dict:
    shape = attention(file)
    if shape["rope_parameters"]["rope_type"] == "yarn":
        shape["rope_parameters"]["truncate"] = False  # the model's YaRN does not round, and no key has this
    pattern = "attention.sliding_window_pattern"
    if is_int(file.metadata.get(file.name(pattern), 2)):
        period = file.int(pattern, 2)
        sliding = [layer % period < period - 1 for layer in range(file.layers)]
    else:
        sliding = file.per_layer(pattern, kind=is_flag)
    return {
        **decoder(file, "gpt_oss", "GptOssForCausalLM"),
        **shape,
        **experts(file, "num_local_experts"),
        "intermediate_size": expert_width(file),
        "sliding_window": file.int("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
    }


@architecture("mixtral", prefix="llama")
def mixtral(file: Metadata) -> dict:
    """llama.cpp calls the architecture "llama", like that of dense models, which transformers reads itself."""
    config = decoder(file, "mixtral", "MixtralForCausalLM") | attention(file) | experts(file, "num_local_experts")
    no_bias(file, config)
    return config | {
        "intermediate_size": file.uniform("feed_forward_length"),
        "sliding_window": None,
    }


@architecture("glm4moe")
def glm4_moe(file: Metadata) -> dict:
    shape = attention(file)
    shape["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # the class has another default
    file.require("expert_gating_func", file.gating(SIGMOID), SIGMOID)
    return {
        **decoder(file, "glm4_moe", "Glm4MoeForCausalLM"),
        **shape,
        **shared_and_routed(file),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensor_names,
        "num_nextn_predict_layers": 0,  # their tensors are dropped
    }


@architecture("deepseek2")
def deepseek(file: Metadata) -> dict:
    """DeepSeek V2 (softmax), V3, R1 and Kimi K2 (sigmoid), and GLM-4.7-Flash, whose class differs only in names."""
    glm = is_glm_flash(file)
    sigmoid = file.gating(SIGMOID if glm else SOFTMAX) == SIGMOID
    file.require("expert_gating_func", file.gating(SIGMOID if glm else SOFTMAX), SIGMOID if sigmoid else SOFTMAX)
    if file.has("attention.temperature_scale"):
        raise file.error("attention.temperature_scale", "no such key: transformers' DeepSeek has no such scale")
    config = decoder(file, "deepseek_v3", "DeepseekV3ForCausalLM") | latent_attention(file) | shared_and_routed(file)
    if glm:
        dense = config.pop("first_k_dense_replace")
        config |= {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
        kinds = ["dense"] * dense + ["sparse"] * (file.layers - dense)
        return config | {"mlp_layer_types": kinds}
    if sigmoid:
        return config | {"num_nextn_predict_layers": 0}  # their tensors are dropped
    file.require("expert_weights_norm", config["norm_topk_prob"], False)
    if any(name.endswith("exp_probs_b.bias") for name in file.tensor_names):
        raise file.error("expert_gating_func", f"{SIGMOID}: transformers has no bias on the experts of a softmax")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    classes = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    return config | classes | {"topk_method": method}


def is_glm_flash(file: Metadata) -> bool:
    """llama.cpp's own rule for old files, or GLM's tokenizer."""
    old = file.layers in (47, 48) and file.vocabulary == 154880
    return old or file.str("tokenizer.ggml.pre", "") in ("glm4", "chatglm-bpe")


def latent_attention(file: Metadata) -> dict:
    """Multi-head latent attention. In a new file the plain key and value lengths are those of the latent vectors."""
    new = file.has("attention.key_length_mla")
    suffix = "_mla" if new else ""
    rotary, heads = file.int("rope.dimension_count"), file.uniform("attention.head_count")
    key_width = file.int(f"attention.key_length{suffix}", minimum=rotary + 1)
    rope_parameters = rope(file, rotary)
    log_multiplier = file.float("rope.scaling.yarn_log_multiplier", 0.0, minimum=-math.inf)
    if rope_parameters["rope_type"] == "yarn" and log_multiplier:
        # The file has 0.1 * mscale_all_dim, which llama.cpp also uses as mscale.
        mscale = round(log_multiplier * 10, 6)
        rope_parameters |= {"mscale": mscale, "mscale_all_dim": mscale}
    low_rank_queries = "blk.0.attn_q_a.weight" in file.tensor_names
    return {
        "num_key_value_heads": heads,  # of the expanded keys; the file has 1, for the latent keys
        "q_lora_rank": file.int("attention.q_lora_rank") if low_rank_queries else None,
        "kv_lora_rank": file.int("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_width - rotary,
        "v_head_dim": file.int(f"attention.value_length{suffix}"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensor_names,
        "rope_parameters": rope_parameters,
    }


@architecture("olmoe")
def olmoe(file: Metadata) -> dict:
    config = decoder(file, "olmoe", "OlmoeForCausalLM") | attention(file) | experts(file)
    config.pop("head_dim")  # the class computes it
    return config | {"norm_topk_prob": file.bool("expert_weights_norm", False), "clip_qkv": None}


@architecture("granitemoe")
def granite_moe(file: Metadata) -> dict:
    shape = attention(file)
    shared = file.int("expert_shared_feed_forward_length", 0, minimum=0)
    kind = ("granitemoeshared", "GraniteMoeSharedForCausalLM") if shared else ("granitemoe", "GraniteMoeForCausalLM")
    own_scale = 1 / math.sqrt(shape.pop("head_dim"))
    return {
        **decoder(file, *kind),
        **shape,
        **experts(file, "num_local_experts"),
        "intermediate_size": file.uniform("feed_forward_length"),
        "logits_scaling": file.float("logit_scale"),
        "residual_multiplier": file.float("residual_scale", 1.0),
        "embedding_multiplier": file.float("embedding_scale", 1.0),
        "attention_multiplier": file.float("attention.scale", own_scale),
    } | ({"shared_intermediate_size": shared} if shared else {})


@architecture("minimax-m2")
def minimax_m2(file: Metadata) -> dict:
    file.require("expert_gating_func", file.gating(SIGMOID), SIGMOID)
    config = decoder(file, "minimax_m2", "MiniMaxM2ForCausalLM") | attention(file) | experts(file, "num_local_experts")
    no_bias(file, config)
    return config | {"intermediate_size": expert_width(file)}


@architecture("dots1")
def dots1(file: Metadata) -> dict:
    file.require("expert_gating_func", file.gating(SIGMOID), SIGMOID)
    return {
        **decoder(file, "dots1", "Dots1ForCausalLM"),
        **attention(file),
        **shared_and_routed(file),
        "sliding_window": None,
        "layer_types": ["full_attention"] * file.layers,
    }


@architecture("hunyuan-moe")
def hunyuan_moe(file: Metadata) -> dict:
    """The class has the same width for routed and shared experts."""
    config = decoder(file, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM") | attention(file)
    width = expert_width(file)
    if file.has("expert_shared_feed_forward_length"):
        file.require("expert_shared_feed_forward_length", file.int("expert_shared_feed_forward_length"), width)
    count = file.int("expert_count")
    return config | {"num_experts": count, "moe_topk": used_experts(file, count), "intermediate_size": width}


@architecture("ernie4_5-moe")
def ernie_moe(file: Metadata) -> dict:
    config = decoder(file, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM") | attention(file)
    count = file.int("expert_count")
    return config | {
        "use_bias": config.pop("attention_bias"),
        "moe_num_experts": count,
        "moe_k": used_experts(file, count),
        "moe_intermediate_size": expert_width(file),
        "moe_num_shared_experts": file.int("expert_shared_count", 0, minimum=0),
        "moe_layer_start_index": file.int("leading_dense_block_count", 0, minimum=0),
        "moe_layer_end_index": file.layers - 1,
        "moe_layer_interval": file.int("interleave_moe_layer_step"),
    }


@architecture("llama4")
def llama4(file: Metadata) -> dict:
    """Llama 4's text model. If the sliding window in the file is 0, every layer rotates."""
    count = file.int("expert_count")
    rotates_everywhere = file.int("attention.sliding_window", 8192, minimum=0) == 0
    config = decoder(file, "llama4_text", "Llama4ForCausalLM") | attention(file) | experts(file, "num_local_experts")
    layers = file.layers
    return config | {
        "intermediate_size": expert_width(file),
        "intermediate_size_mlp": file.uniform("feed_forward_length"),
        "interleave_moe_layer_step": file.int("interleave_moe_layer_step"),
        "use_qk_norm": count != 128,  # llama.cpp's rule: the model with 128 experts has none
        "no_rope_layers": [int(rotates_everywhere or (layer + 1) % 4 != 0) for layer in range(layers)],
        "attn_temperature_tuning": not rotates_everywhere,
        "attention_chunk_size": 8192,
        "layer_types": [
            "full_attention" if rotates_everywhere or (layer + 1) % 4 == 0 else "chunked_attention"
            for layer in range(layers)
        ],
    }


@architecture("gemma4")
def gemma4(file: Metadata) -> dict:
    """Gemma 4's text model, with and without experts."""
    sliding = file.per_layer("attention.sliding_window_pattern", kind=is_flag)
    kv_heads = file.per_layer("attention.head_count_kv", file.uniform("attention.head_count"))
    widths = file.per_layer("feed_forward_length")
    shared = file.int("attention.shared_kv_layers", 0, minimum=0, maximum=file.layers - 1)
    full = [layer for layer, flag in enumerate(sliding) if not flag]
    sliding_heads = [heads for heads, flag in zip(kv_heads, sliding, strict=True) if flag]
    config = decoder(file, "gemma4_text", "Gemma4ForCausalLM") | {
        "eos_token_id": [1, 106, 50],  # as in transformers' own reader
        "head_dim": file.int("attention.key_length_swa"),
        "global_head_dim": file.int("attention.key_length"),
        "num_key_value_heads": (sliding_heads or kv_heads)[0],
        "num_global_key_value_heads": kv_heads[full[-1]] if full else None,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in file.tensor_names,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "sliding_window": file.int("attention.sliding_window"),
        "hidden_size_per_layer_input": file.int("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": file.vocabulary,
        "final_logit_softcapping": file.float("final_logit_softcapping", None),
        "rope_parameters": gemma4_rope(file),
    }
    if not file.int("expert_count", 0, minimum=0):
        return config | {"enable_moe_block": False}
    of_experts = experts(file)
    return config | {
        "enable_moe_block": True,
        "num_experts": of_experts["num_experts"],
        "top_k_experts": of_experts["num_experts_per_tok"],
        "moe_intermediate_size": expert_width(file),
    }


def gemma4_rope(file: Metadata) -> dict:
    """Full attention rotates a part of each head: the divisors in the tensor are 1 for it, and huge for the rest."""
    width, rotary = file.int("attention.key_length"), file.int("rope.dimension_count_swa", 0, minimum=0)
    sliding_width = file.int("attention.key_length_swa")
    part = 0.25  # the same for every Gemma 4
    if file.has(ROPE_FREQS):
        divisors = file.numbers(ROPE_FREQS)
        if len(divisors) != width // 2:
            raise file.error(ROPE_FREQS, f"{width // 2} numbers")
        part = sum(divisor < 1e20 for divisor in divisors) * 2 / width
    sliding = {"rope_type": "default", "rope_theta": file.float("rope.freq_base_swa", 10000.0)}
    if rotary not in (0, sliding_width):
        sliding["partial_rotary_factor"] = rotary / sliding_width
    return {
        "sliding_attention": sliding,
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": part,
            "rope_theta": file.float("rope.freq_base", 10000.0),
        },
    }
