"""Parts of a configuration that several architectures have, from a GGUF file's metadata."""

from __future__ import annotations

import math

from .metadata import REQUIRED, Metadata, rope


def decoder(file: Metadata, model_type: str, class_name: str) -> dict:
    """The metadata that all decoders share."""
    if "blk.0.attn_qkv.weight" in file.tensor_names and file.arch != "qwen3next":
        raise ValueError("blk.0.attn_qkv.weight: expected attn_q, attn_k and attn_v apart, got them in one tensor")
    config = {
        "model_type": model_type,
        # Callers that select a class by `architectures` need it, and no key has it.
        "architectures": [class_name],
        "vocab_size": file.vocabulary,
        "max_position_embeddings": file.int("context_length"),
        "hidden_size": file.int("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.uniform("attention.head_count"),
        "rms_norm_eps": file.float("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        # llama.cpp writes the output projection only if it differs from the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "bos_token_id": file.token("bos"),
        "eos_token_id": end_tokens(file),
        "pad_token_id": file.token("padding"),
    }
    if file.has("feed_forward_length"):
        config["intermediate_size"] = max(file.per_layer("feed_forward_length", minimum=0))
    return config


def no_bias(file: Metadata, config: dict) -> None:
    if config.pop("attention_bias"):
        raise ValueError(
            f"blk.0.attn_q.bias: expected no such tensor: transformers' model of {file.arch!r} has no bias"
        )


def end_tokens(file: Metadata) -> int | list[int] | None:
    """As in llama.cpp, generation ends at the end of a text, of a turn or of a message."""
    ids = dict.fromkeys(token for name in ("eos", "eot", "eom") if (token := file.token(name)) is not None)
    return next(iter(ids), None) if len(ids) <= 1 else [*ids]


def attention(file: Metadata) -> dict:
    """Attention whose heads have one width for queries, keys and values."""
    heads = file.uniform("attention.head_count")
    width = file.int("attention.key_length", file.int("embedding_length") // heads)
    if file.has("attention.value_length"):
        file.require("attention.value_length", file.int("attention.value_length"), width)
    rotary = file.int("rope.dimension_count", width, maximum=width)
    return {
        "num_key_value_heads": file.uniform("attention.head_count_kv", heads),
        "head_dim": width,
        "rope_parameters": rope(file, rotary) | ({"partial_rotary_factor": rotary / width} if rotary != width else {}),
    }


def experts(file: Metadata, count_name: str = "num_experts") -> dict:
    count = file.int("expert_count")
    return {count_name: count, "num_experts_per_tok": used_experts(file, count)}


def used_experts(file: Metadata, count: int) -> int:
    used = file.uniform("expert_used_count")
    if used > count:
        raise file.error("expert_used_count", f"at most expert_count, which is {count}")
    return used


def expert_width(file: Metadata, default=REQUIRED) -> int:
    """The experts' inner size. If an old file lacks it, llama.cpp divides the dense width by the number of experts per
    token."""
    if default is None and not file.has("expert_feed_forward_length"):
        return file.uniform("feed_forward_length") // file.uniform("expert_used_count")
    return file.uniform("expert_feed_forward_length")


def groups(file: Metadata) -> dict:
    """Groups of experts. Without the keys there is one group, as in llama.cpp."""
    count = file.int("expert_count")
    group_count = file.int("expert_group_count", 1, minimum=0) or 1
    if count % group_count:
        raise file.error("expert_group_count", f"a divisor of expert_count, which is {count}")
    used = file.int("expert_group_used_count", group_count, minimum=0, maximum=group_count)
    return {"n_group": group_count, "topk_group": used or group_count}


def shared_and_routed(file: Metadata) -> dict:
    """The keys of DeepSeek and its descendants: dense first layers, shared and routed experts."""
    return {
        **experts(file, "n_routed_experts"),
        **groups(file),
        "moe_intermediate_size": expert_width(file),
        "n_shared_experts": file.int("expert_shared_count"),
        "first_k_dense_replace": file.int("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": file.float("expert_weights_scale", 0.0, minimum=-math.inf) or 1.0,
        "norm_topk_prob": file.bool("expert_weights_norm", False),
    }
