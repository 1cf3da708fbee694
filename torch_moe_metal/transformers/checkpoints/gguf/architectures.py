"""Renames GGUF's tensors to transformers' weights, for architectures that transformers' own reader does not support.

As in transformers' table, each entry is a function of a configuration. It returns WeightRenamings, which are applied
one after the other, and WeightConverters, of which at most one matches a renamed tensor. llama.cpp does not split rows
of weights, so most packed blocks do not change.
"""

from collections.abc import Callable

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.gguf.gguf_conversion_mapping import (
    ConcatenateRows,
    LogNegate,
    PermuteRows,
    SubtractOne,
    Unsqueeze,
)

from .... import joining
from .config import CONFIGS

__all__ = ["CONFIGS", "CONVERSIONS", "halves"]

# The target of tensors for multi-token prediction. No model has such a module, so they are dropped.
DROPPED = "mtp."

# The last parts of names in the file and in the model that all decoders share.
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
POST_ATTENTION_NORM = {"post_attention_norm": "post_attention_layernorm"}


def halves(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Packed gate and up rows of all experts, [E, I, bytes] each, as one [E, 2, I, bytes]. It is a view if both are in
    the pages of the same file and gate comes first, as llama.cpp stores them."""
    E, rows, size = gate.shape
    distance = up.storage_offset() - gate.storage_offset()
    if gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() and distance > 0:
        return gate.as_strided((E, 2, rows, size), (rows * size, distance, size, 1))
    return joining.stack((gate, up), 1)


class JoinGateUp(ConversionOps):
    """Joins gate and up weights [E, I, H], or biases [E, I], into one parameter of the experts' module.

    Dense weights become [E, 2I, H]: all gate rows first, or gate and up rows alternately if `interleaved`; or [E, H,
    2I] if `transposed`. Packed weights become [E, 2, I, bytes].
    """

    supports_packed = True

    def __init__(self, transposed: bool = False, interleaved: bool = False):
        self.transposed, self.interleaved = transposed, interleaved

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        gate, up = (single(input_dict[pattern]) for pattern in source_patterns)
        if gate.dtype == torch.uint8:
            return {target_patterns[0]: halves(gate, up)}
        joined = joining.stack((gate, up), 2 if self.interleaved else 1).flatten(1, 2)
        return {target_patterns[0]: joined.transpose(1, 2).contiguous() if self.transposed else joined}


class ExpertRows(ConversionOps):
    """Down weights [E, H, I], transposed to [E, I, H] for `transposed` modules. Packed blocks do not change."""

    supports_packed = True

    def __init__(self, transposed: bool = False):
        self.transposed = transposed

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        weight = single(next(iter(input_dict.values())))
        turned = self.transposed and weight.dtype != torch.uint8
        return {target_patterns[0]: weight.transpose(1, 2).contiguous() if turned else weight}


class JoinLatentHeads(ConversionOps):
    """Makes `kv_b_proj` of latent attention from its halves: keys [heads, rank, width], values [heads, width, rank].

    The file stores transposed keys, so packed blocks cannot be kept.
    """

    def __init__(self, heads: int, rank: int):
        self.heads, self.rank = heads, rank

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        keys, values = (single(input_dict[pattern]) for pattern in source_patterns)
        keys = keys.reshape(self.heads, self.rank, -1).transpose(1, 2)
        joined = torch.cat((keys, values.reshape(self.heads, -1, self.rank)), 1)
        return {target_patterns[0]: joined.reshape(-1, self.rank)}


def single(tensors) -> torch.Tensor:
    return tensors[0] if isinstance(tensors, list) else tensors


def renamings(config, leaves: dict[str, str]) -> list[WeightTransform]:
    """The names outside of the layers, the prefix of the layers, and `leaves`, applied in this order."""
    layers = "|".join(map(str, range(config.num_hidden_layers)))
    return [
        WeightRenaming(r"^token_embd\.", "model.embed_tokens."),
        WeightRenaming(r"^output_norm\.", "model.norm."),
        WeightRenaming(r"^output\.", "lm_head."),
        WeightRenaming(rf"^blk\.({layers})\.", r"model.layers.\1."),
        WeightRenaming(r"^blk\.", DROPPED),
        *(WeightRenaming(rf"\.{leaf}\.", f".{name}.") for leaf, name in leaves.items()),
    ]


def dense(block: str = "mlp") -> dict[str, str]:
    return {f"ffn_{name}": f"{block}.{name}_proj" for name in ("gate", "up", "down")}


def shared(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


def convert(sources: str | list[str], target: str, *operations: ConversionOps) -> WeightConverter:
    return WeightConverter(sources, target, operations=[*operations])


def experts(block: str = "mlp.experts", transposed: bool = False, interleaved: bool = False) -> list[WeightTransform]:
    """Experts. A file may have gate and up in one tensor with all gate rows first, which no transposed module uses."""
    gate_up = [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"]
    both = [] if transposed else [WeightRenaming(r"\.ffn_gate_up_exps\.weight", f".{block}.gate_up_proj")]
    return [
        *both,
        convert(gate_up, f".{block}.gate_up_proj", JoinGateUp(transposed, interleaved)),
        convert(r"\.ffn_down_exps\.weight", f".{block}.down_proj", ExpertRows(transposed)),
    ]


def score_bias(target: str = "mlp.gate.e_score_correction_bias") -> list[WeightTransform]:
    return [WeightRenaming(r"\.exp_probs_b\.bias", f".{target}")]


def rotary_halves(heads: int, width: int) -> PermuteRows:
    """llama.cpp stores a head's rotated pairs next to each other; the model has the first elements of all pairs
    first."""
    rows = torch.arange(heads * width, device="cpu")  # on the CPU, because the default device may be meta
    return PermuteRows(rows.reshape(heads, width // 2, 2).transpose(1, 2).flatten())


def paired_rotation(config) -> list[WeightTransform]:
    """Query and key rows of files that llama.cpp permutes."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    return [
        convert(rf"self_attn\.{name}_proj\.{kind}", f"self_attn.{name}_proj.{kind}", rotary_halves(count, width))
        for name, count in counts.items()
        for kind in ("weight", "bias")
    ]


def qwen3_moe(config) -> list[WeightTransform]:
    return renamings(config, ATTENTION | PRE_NORM | {"ffn_gate_inp": "mlp.gate"}) + experts()


def shared_gate() -> list[WeightTransform]:
    """The gate of the shared expert, [1, H], which llama.cpp may have squeezed."""
    target = ".mlp.shared_expert_gate.weight"
    return [convert(r"\.ffn_gate_inp_shexp\.weight", target, Unsqueeze(0, expected_ndim=2))]


def qwen2_moe(config) -> list[WeightTransform]:
    leaves = ATTENTION | PRE_NORM | {"ffn_gate_inp": "mlp.gate"} | shared("mlp.shared_expert")
    return renamings(config, leaves) + shared_gate() + experts()


def qwen3_next(config) -> list[WeightTransform]:
    """Norms store 1 + w, except in linear attention, whose query, key, value and gate rows are grouped differently."""
    leaves = {leaf: name for leaf, name in ATTENTION.items() if not leaf.endswith("norm")}
    linear = {"ssm_in": "in_proj_qkvz", "ssm_ba": "in_proj_ba", "ssm_norm": "norm", "ssm_out": "out_proj"}
    leaves |= {"ffn_gate_inp": "mlp.gate"} | shared("mlp.shared_expert")
    leaves |= {leaf: f"linear_attn.{name}" for leaf, name in linear.items()}
    norms = {
        r"^model\.norm": "model.norm",
        r"\.attn_norm": ".input_layernorm",
        r"\.post_attention_norm": ".post_attention_layernorm",
        r"\.attn_q_norm": ".self_attn.q_norm",
        r"\.attn_k_norm": ".self_attn.k_norm",
    }
    return [
        *renamings(config, leaves),
        WeightRenaming(r"\.ssm_dt\.bias", ".linear_attn.dt_bias"),
        *(convert(rf"{leaf}\.weight", f"{name}.weight", SubtractOne()) for leaf, name in norms.items()),
        convert(r"\.ssm_a", ".linear_attn.A_log", LogNegate()),
        convert(r"\.ssm_conv1d\.weight", ".linear_attn.conv1d.weight", Unsqueeze(1)),
        convert(
            [r"\.attn_qkv\.weight", r"\.attn_gate\.weight"],
            ".linear_attn.in_proj_qkvz.weight",
            ConcatenateRows(0),
            PermuteRows(rows_by_key_head(config)),
        ),
        *shared_gate(),
        *experts(),
    ]


def rows_by_key_head(config) -> torch.Tensor:
    """The order that turns all queries, keys, values and gates, one after the other, into groups by key head."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    sizes = [heads * key, heads * key, heads * value, heads * value]
    parts = torch.arange(sum(sizes), device="cpu").split(sizes)
    return torch.cat([part.reshape(heads, -1) for part in parts], 1).flatten()


def gpt_oss(config) -> list[WeightTransform]:
    biases = [r"\.ffn_gate_exps\.bias", r"\.ffn_up_exps\.bias"]
    return [
        *renamings(config, ATTENTION | POST_ATTENTION_NORM | {"ffn_gate_inp": "mlp.router"}),
        WeightRenaming(r"\.attn_sinks\.weight", ".self_attn.sinks"),
        WeightRenaming(r"\.ffn_down_exps\.bias", ".mlp.experts.down_proj_bias"),
        convert(biases, ".mlp.experts.gate_up_proj_bias", JoinGateUp(interleaved=True)),
        *experts(transposed=True, interleaved=True),
    ]


def mixtral(config) -> list[WeightTransform]:
    return qwen3_moe(config) + paired_rotation(config)


def routed_with_shared(config) -> list[WeightTransform]:
    """GLM 4 and dots: dense first layers, then routed and shared experts."""
    leaves = ATTENTION | PRE_NORM | POST_ATTENTION_NORM | dense() | shared("mlp.shared_experts")
    return renamings(config, leaves | {"ffn_gate_inp": "mlp.gate"}) + score_bias() + experts()


def deepseek(config) -> list[WeightTransform]:
    """The old layout has a whole `kv_b_proj`; the new one has its transposed keys and its values."""
    latent = {
        "attn_q_a": "q_a_proj",
        "attn_q_a_norm": "q_a_layernorm",
        "attn_q_b": "q_b_proj",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa",
        "attn_kv_a_norm": "kv_a_layernorm",
        "attn_kv_b": "kv_b_proj",
    }
    heads = JoinLatentHeads(config.num_attention_heads, config.kv_lora_rank)
    return [
        *routed_with_shared(config),
        *(WeightRenaming(rf"\.{leaf}\.", f".self_attn.{name}.") for leaf, name in latent.items()),
        convert([r"\.attn_k_b\.weight", r"\.attn_v_b\.weight"], ".self_attn.kv_b_proj.weight", heads),
    ]


def granite_moe(config) -> list[WeightTransform]:
    leaves = ATTENTION | PRE_NORM | {"ffn_gate_inp": "block_sparse_moe.router"}
    gate_up = [r"\.ffn_gate_shexp\.weight", r"\.ffn_up_shexp\.weight"]
    return [
        *renamings(config, leaves | {"ffn_down_shexp": "shared_mlp.output_linear"}),
        convert(gate_up, ".shared_mlp.input_linear.weight", ConcatenateRows(0)),
        *paired_rotation(config),
        *experts("block_sparse_moe.experts"),
    ]


def minimax_m2(config) -> list[WeightTransform]:
    return qwen3_moe(config) + score_bias("mlp.e_score_correction_bias")


def hunyuan_moe(config) -> list[WeightTransform]:
    norms = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    leaves = ATTENTION | norms | PRE_NORM | {"ffn_gate_inp": "mlp.gate.wg"} | shared("mlp.shared_mlp")
    return renamings(config, leaves) + experts()


def ernie_moe(config) -> list[WeightTransform]:
    bias = ".mlp.gate.moe_statics.e_score_correction_bias"
    leaves = ATTENTION | PRE_NORM | dense() | shared("mlp.shared_experts") | {"ffn_gate_inp": "mlp.gate"}
    return [
        *renamings(config, leaves),
        convert(r"\.exp_probs_b\.bias", bias, Unsqueeze(0, expected_ndim=2)),
        *experts(),
    ]


def llama4(config) -> list[WeightTransform]:
    block = "feed_forward"
    leaves = (
        ATTENTION | PRE_NORM | dense(block) | shared(f"{block}.shared_expert") | {"ffn_gate_inp": f"{block}.router"}
    )
    return renamings(config, leaves) + experts(f"{block}.experts", transposed=True)


def gemma4(config) -> list[WeightTransform]:
    leaves = {
        "proj": "per_layer_projection",  # before the names with the same ending
        **ATTENTION,
        **POST_ATTENTION_NORM,
        **dense(),
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "post_norm": "post_per_layer_input_norm",
    }
    return [
        *renamings(config, leaves),
        WeightRenaming(r"^per_layer_token_embd\.", "model.embed_tokens_per_layer."),
        WeightRenaming(r"^per_layer_model_proj\.", "model.per_layer_model_projection."),
        WeightRenaming(r"^per_layer_proj_norm\.", "model.per_layer_projection_norm."),
        WeightRenaming(r"\.layer_output_scale\.weight", ".layer_scalar"),
        WeightRenaming(r"\.ffn_gate_inp\.weight", ".router.proj.weight"),
        WeightRenaming(r"\.ffn_gate_inp\.scale", ".router.scale"),
        WeightRenaming(r"\.ffn_down_exps\.scale", ".router.per_expert_scale"),
        *experts("experts"),
    ]


# GGUF architecture -> function of the model's configuration
CONVERSIONS: dict[str, Callable[[object], list[WeightTransform]]] = {
    "deepseek2": deepseek,
    "dots1": routed_with_shared,
    "ernie4_5-moe": ernie_moe,
    "gemma4": gemma4,
    "glm4moe": routed_with_shared,
    "gpt-oss": gpt_oss,
    "granitemoe": granite_moe,
    "hunyuan-moe": hunyuan_moe,
    "llama4": llama4,
    "minimax-m2": minimax_m2,
    "mixtral": mixtral,
    "olmoe": qwen3_moe,
    "qwen2moe": qwen2_moe,
    "qwen3moe": qwen3_moe,
    "qwen3next": qwen3_next,
}
