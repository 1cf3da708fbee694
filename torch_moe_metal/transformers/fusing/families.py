"""Tables of the classes of transformers that `patch` can fuse: MoE blocks, attention and decoder layers.

Modules are recognised by their class, never by the name of an attribute, which may mislead: Laguna's router has the
name of another model's router. A routing function gets the router and the block, and returns arguments of
`torch.ops.moe_metal.gate`. It reads the parameters at every call, so they may be moved, cast, loaded or tied at any
time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import member, prepared


@dataclass(frozen=True)
class Block:
    """The structure of one class of MoE block. The strings are names of attributes."""

    routing: Callable[[nn.Module, nn.Module], dict]
    router: str = "gate"
    shared: str | None = None  # the shared expert
    shared_gate: str | None = None  # the linear layer that computes the shared expert's gate
    returns: str = "output"  # "output, weights" (gpt-oss) or "output, logits" (Llama 4)


# ------------------------------------------------------------------------------------------------ softmax


def softmax(router, block):
    """The k best of the softmax over all experts, divided by their sum. This equals the softmax over the k best logits,
    which some models compute."""
    return {"router_weight": member(router, "weight"), "top_k": router.top_k}


def unnormalized(router, block):
    return softmax(router, block) | {"renormalize": "none"}


def softmax_optional(router, block):
    """The same, divided by their sum only if the configuration says so."""
    return softmax(router, block) if router.norm_topk_prob else unnormalized(router, block)


def gpt_oss(router, block):
    return softmax(router, block) | {"router_bias": member(router, "bias")}


def hunyuan_v1(router, block):
    return {"router_weight": router.wg.weight, "top_k": router.top_k}


def deepseek_v2(router, block):
    """The k best of the softmax within the best groups, without division by their sum and without a bias."""
    grouped = router.topk_method == "group_limited_greedy"
    return unnormalized(router, block) | {
        "scaling_factor": router.routed_scaling_factor,
        "n_group": router.num_group if grouped else 1,
        "topk_group": router.topk_group if grouped else 1,
        "group_score": "max",
    }


def mistral4(router, block):
    return softmax_optional(router, block) | {
        "scaling_factor": router.routed_scaling_factor,
        "n_group": router.num_group,
        "topk_group": router.topk_group,
    }


# ------------------------------------------------------------------------------------------------ sigmoid


def deepseek_v3(router, block):
    """The k best sigmoids by score + bias, within the best groups."""
    return mistral4(router, block) | {"scoring": "sigmoid", "select_bias": router.e_score_correction_bias}


def sigmoid_bias(router, block):
    """The k best sigmoids by score + bias, of all experts, divided by their sum."""
    return softmax(router, block) | {"scoring": "sigmoid", "select_bias": block.e_score_correction_bias}


def hy_v3(router, block):
    return sigmoid_bias(router, block) | {"scaling_factor": router.router_scaling_factor}


def minimax_m3(router, block):
    """The block scales the experts' sum, which equals scaling the weights."""
    return softmax(router, block) | {
        "scoring": "sigmoid",
        "select_bias": router.e_score_correction_bias,
        "scaling_factor": block.routed_scaling_factor,
    }


def laguna(router, block):
    return minimax_m3(router, block) | {"softcap": router.router_logit_softcapping}


def flint(router, block):
    return softmax_optional(router, block) | {"scoring": "sigmoid"}


def llama4(router, block):
    """The weight is the sigmoid of the logit; the block multiplies the expert's input by it."""
    return unnormalized(router, block) | {"scoring": "sigmoid"}


# ------------------------------------------------------------------------------------------------ the table

GATED_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}
DEEPSEEK_V2 = Block(deepseek_v2, shared="shared_experts")
DEEPSEEK_V3 = Block(deepseek_v3, shared="shared_experts")
GRANITE = Block(softmax, router="router")
QWEN = Block(softmax_optional)
QWEN_SHARED = Block(softmax_optional, **GATED_SHARED)

BLOCKS = {
    "qwen2_moe.Qwen2MoeSparseMoeBlock": QWEN_SHARED,
    "qwen3_moe.Qwen3MoeSparseMoeBlock": QWEN,
    "qwen3_vl_moe.Qwen3VLMoeTextSparseMoeBlock": Block(softmax),
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextSparseMoeBlock": QWEN,
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextSparseMoeBlock": QWEN_SHARED,
    "qwen3_next.Qwen3NextSparseMoeBlock": QWEN_SHARED,
    "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": Block(softmax, **GATED_SHARED),
    "qwen4_exp.Qwen4ExpTextSparseMoeBlock": QWEN_SHARED,
    "mixtral.MixtralSparseMoeBlock": Block(softmax),
    "minimax.MiniMaxSparseMoeBlock": Block(softmax),
    "olmoe.OlmoeSparseMoeBlock": QWEN,
    "flex_olmo.FlexOlmoSparseMoeBlock": QWEN,
    "mellum.MellumSparseMoeBlock": QWEN,
    "jamba.JambaSparseMoeBlock": Block(unnormalized, router="router"),
    "hunyuan_v1_moe.HunYuanMoEV1Moe": Block(hunyuan_v1, shared="shared_mlp"),
    "gpt_oss.GptOssMLP": Block(gpt_oss, router="router", returns="output, weights"),
    "granitemoe.GraniteMoeMoE": GRANITE,
    "granitemoe_swa.GraniteMoeSWAMoE": GRANITE,
    "granitemoehybrid.GraniteMoeHybridMoE": GRANITE,
    "granitemoeshared.GraniteMoeSharedMoE": GRANITE,
    "deepseek_v2.DeepseekV2Moe": DEEPSEEK_V2,
    "deepseek_ocr2.DeepseekOcr2TextMoe": DEEPSEEK_V2,
    "unlimited_ocr.UnlimitedOcrTextMoe": DEEPSEEK_V2,
    "deepseek_v3.DeepseekV3MoE": DEEPSEEK_V3,
    "deepseek_v32.DeepseekV32MoE": DEEPSEEK_V3,
    "bailing_hybrid.BailingHybridMoE": DEEPSEEK_V3,
    "dots1.Dots1MoE": DEEPSEEK_V3,
    "dots3_note.Dots3NoteTextMoE": DEEPSEEK_V3,
    "glm4_moe.Glm4MoeMoE": DEEPSEEK_V3,
    "glm4_moe_lite.Glm4MoeLiteMoE": DEEPSEEK_V3,
    "glm4v_moe.Glm4vMoeTextMoE": DEEPSEEK_V3,
    "glm5_next.Glm5NextTextMoE": DEEPSEEK_V3,
    "glm_moe_dsa.GlmMoeDsaMoE": DEEPSEEK_V3,
    "hy_v4.HYV4MoE": DEEPSEEK_V3,
    "hy_v4_vl.HYV4VLMoE": DEEPSEEK_V3,
    "kimi_linear.KimiLinearMoE": DEEPSEEK_V3,
    "solar_open.SolarOpenMoE": DEEPSEEK_V3,
    "mimo_v2_flash.MiMoV2FlashMoE": Block(deepseek_v3),
    "mistral4.Mistral4MoE": Block(mistral4, shared="shared_experts"),
    "minimax_m2.MiniMaxM2SparseMoeBlock": Block(sigmoid_bias),
    "minimax_m3_vl.MiniMaxM3VLSparseMoeBlock": Block(minimax_m3, shared="shared_experts"),
    "laguna.LagunaSparseMoeBlock": Block(laguna, shared="shared_experts"),
    "hy_v3.HYV3MoE": Block(hy_v3, shared="shared_experts"),
    "flint.FlintSparseMoeBlock": Block(flint, shared="shared_expert"),
    "lara_mini.LaraMiniSparseMoeBlock": Block(softmax_optional, shared="shared_expert"),
    "llama4.Llama4TextMoe": Block(llama4, router="router", shared="shared_expert", returns="output, logits"),
}

# Decoder layers that compute x + attention(norm(x)), then x + mlp(norm(x)), with Llama's RMS norm.
PRE_NORM_LAYERS = {
    "qwen2_moe.Qwen2MoeDecoderLayer",
    "qwen3_moe.Qwen3MoeDecoderLayer",
    "qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer",
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextDecoderLayer",
    "mellum.MellumDecoderLayer",
    "mixtral.MixtralDecoderLayer",
    "olmoe.OlmoeDecoderLayer",
    "gpt_oss.GptOssDecoderLayer",
    "deepseek_v2.DeepseekV2DecoderLayer",
    "deepseek_v3.DeepseekV3DecoderLayer",
    "glm4_moe.Glm4MoeDecoderLayer",
    "glm4_moe_lite.Glm4MoeLiteDecoderLayer",
    "glm4v_moe.Glm4vMoeTextDecoderLayer",
    "dots1.Dots1DecoderLayer",
    "solar_open.SolarOpenDecoderLayer",
    "mimo_v2_flash.MiMoV2FlashDecoderLayer",
    "mistral4.Mistral4DecoderLayer",
    "minimax_m2.MiniMaxM2DecoderLayer",
    "hunyuan_v1_moe.HunYuanMoEV1DecoderLayer",
    "hy_v3.HYV3DecoderLayer",
    "laguna.LagunaDecoderLayer",
    "flint.FlintDecoderLayer",
}
GEMMA4_LAYERS = {"gemma4.Gemma4TextDecoderLayer"}


# The norm after the last layer.
LAST_NORMS = {name.replace("DecoderLayer", "RMSNorm") for name in PRE_NORM_LAYERS}
LAST_NORMS |= {"gemma4.Gemma4RMSNorm", "glm4v_moe.Glm4vMoeRMSNorm", "qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm"}


# ------------------------------------------------------------------------------------------------ attention


def always(attention):
    return True


def never(attention):
    return False


def llama4_rotates(attention):
    return attention.use_rope


def in_windows(attention):
    return attention.sliding_window is not None


def plain_weight(norm):
    return member(norm, "weight")


def one_plus_weight(norm):
    return prepared(norm, "weight", lambda weight: 1 + weight.float())


def no_weight(norm):
    return None


def softplus(gate):
    return F.softplus(gate.float()).to(gate.dtype)


def llama4_temperature(attention, x, cache, position_ids):
    """Llama 4 scales the queries of layers without rope by their position in the sequence, including padding."""
    if attention.use_rope or not attention.attn_temperature_tuning:
        return None
    past = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
    places = torch.arange(x.shape[1], device=x.device) + past  # a static cache's length is a tensor
    steps = torch.floor((places.float() + 1.0) / attention.floor_scale)
    return (torch.log1p(steps) * attention.attn_scale + 1.0)[:, None]


def mistral4_temperature(attention, x, cache, position_ids):
    rope = attention.config.rope_parameters
    steps = torch.floor(position_ids / rope.get("original_max_position_embeddings"))
    return (1 + rope.get("llama_4_scaling_beta") * torch.log(1 + steps))[:, None, :, None].to(x.dtype)


@dataclass(frozen=True)
class Attention:
    """The structure of one class of attention. All have o_proj, and q_proj, k_proj and v_proj or, if they cache latents
    (MLA), the corresponding projections. Norms, sinks, g_proj (an output gate), v_head_dim and v_scale are used if the
    module has them.
    """

    window: str = ""  # the object with the attribute `sliding_window`: "module" or "config"
    angles: str = "twice"  # cos and sin contain each angle "twice", for both halves of a head, or "once"; or "complex"
    rotates: Callable[[nn.Module], bool] = always  # some layers have no rope
    norms: tuple[str, ...] = ("q_norm", "k_norm")
    norm_weight: Callable[[nn.Module], Tensor | None] = plain_weight
    norms_first: bool = True  # before the rotation
    gate: Callable[[Tensor], Tensor] | None = None  # of the output; without g_proj, q_proj computes it after each head
    temperature: Callable[..., Tensor | None] | None = None  # a factor for [B, A, T, D] queries


PLAIN = Attention()
OWN_WINDOW = Attention(window="module")
WINDOW_OF_ALL = Attention(window="config")
QWEN_GATED = Attention(norm_weight=one_plus_weight, gate=torch.sigmoid)

ATTENTIONS = {
    "qwen2_moe.Qwen2MoeAttention": PLAIN,
    "qwen3_moe.Qwen3MoeAttention": OWN_WINDOW,
    "qwen3_vl_moe.Qwen3VLMoeTextAttention": PLAIN,
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention": OWN_WINDOW,
    "qwen3_next.Qwen3NextAttention": QWEN_GATED,
    "qwen3_5_moe.Qwen3_5MoeAttention": QWEN_GATED,
    "mellum.MellumAttention": OWN_WINDOW,
    "mixtral.MixtralAttention": WINDOW_OF_ALL,
    "minimax.MiniMaxAttention": WINDOW_OF_ALL,
    "olmoe.OlmoeAttention": WINDOW_OF_ALL,
    "flex_olmo.FlexOlmoAttention": PLAIN,
    "jamba.JambaAttention": Attention(rotates=never),
    "gpt_oss.GptOssAttention": Attention(window="module", angles="once"),
    "glm4_moe.Glm4MoeAttention": PLAIN,
    "glm4v_moe.Glm4vMoeTextAttention": PLAIN,
    "dots1.Dots1Attention": OWN_WINDOW,
    "deepseek_ocr2.DeepseekOcr2TextAttention": PLAIN,
    "unlimited_ocr.UnlimitedOcrTextAttention": PLAIN,
    "solar_open.SolarOpenAttention": PLAIN,
    "mimo_v2_flash.MiMoV2FlashAttention": OWN_WINDOW,
    "minimax_m2.MiniMaxM2Attention": PLAIN,
    "hunyuan_v1_moe.HunYuanMoEV1Attention": Attention(norms=("query_layernorm", "key_layernorm"), norms_first=False),
    "hy_v3.HYV3Attention": PLAIN,
    "laguna.LagunaAttention": Attention(window="module", gate=softplus),
    "flint.FlintAttention": Attention(window="module", rotates=in_windows),
    "lara_mini.LaraMiniAttention": Attention(window="module", rotates=in_windows),
    "granitemoe.GraniteMoeAttention": PLAIN,
    "granitemoe_swa.GraniteMoeSWAAttention": OWN_WINDOW,
    "granitemoehybrid.GraniteMoeHybridAttention": PLAIN,
    "granitemoeshared.GraniteMoeSharedAttention": PLAIN,
    "llama4.Llama4TextAttention": Attention(
        angles="complex",
        rotates=llama4_rotates,
        norms=("qk_norm", "qk_norm"),
        norm_weight=no_weight,
        norms_first=False,
        temperature=llama4_temperature,
    ),
}
# It also normalises values. Some layers have no v_proj, or use the keys and values of another layer.
GEMMA4_ATTENTIONS = {
    "gemma4.Gemma4TextAttention": Attention(window="module", norms=("q_norm", "k_norm", "v_norm")),
}
# Attention whose keys and values are cached as latents (MLA).
LATENTS = ("q_a_layernorm", "kv_a_layernorm")
LATENT = Attention(norms=LATENTS)
LATENT_ATTENTIONS = {
    "deepseek_v2.DeepseekV2Attention": Attention(norms=LATENTS, angles="complex"),
    "deepseek_v3.DeepseekV3Attention": LATENT,
    "glm4_moe_lite.Glm4MoeLiteAttention": LATENT,
    "mistral4.Mistral4Attention": Attention(norms=LATENTS, temperature=mistral4_temperature),
    "kimi_linear.KimiLinearAttention": Attention(norms=LATENTS, rotates=never),
    "bailing_hybrid.BailingHybridAttention": Attention(norms=LATENTS, gate=torch.sigmoid),
}

# Attention that is not fused, and the reason.
RECURRENT = "it keeps a recurrent state instead of keys and values"
INDEXED = "its indexer selects the keys of each query (sparse attention)"
LEFT_ATTENTIONS = {
    "qwen3_next.Qwen3NextGatedDeltaNet": RECURRENT,
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": RECURRENT,
    "qwen4_exp.Qwen4ExpTextGatedDeltaNet": RECURRENT,
    "lara_mini.LaraMiniGatedDeltaNet": RECURRENT,
    "minimax.MiniMaxLightningAttention": RECURRENT,
    "jamba.JambaMambaMixer": RECURRENT,
    "granitemoehybrid.GraniteMoeHybridMambaLayer": RECURRENT,
    "kimi_linear.KimiLinearDeltaAttention": RECURRENT,
    "bailing_hybrid.BailingHybridDeltaAttention": RECURRENT,
    "glm5_next.Glm5NextTextLinearAttention": RECURRENT,
    "glm5_next.Glm5NextTextAttention": INDEXED,
    "glm_moe_dsa.GlmMoeDsaAttention": INDEXED,
    "qwen4_exp.Qwen4ExpTextAttention": INDEXED,
    "deepseek_v32.DeepseekV32Attention": INDEXED,
    "dots3_note.Dots3NoteTextAttention": INDEXED,
    "hy_v4.HYV4Attention": INDEXED,
    "hy_v4_vl.HYV4VLAttention": INDEXED,
    "minimax_m3_vl.MiniMaxM3VLAttention": "in some layers an indexer selects the keys of each query (sparse attention)",
}


def family_name(cls: type) -> str | None:
    """'qwen3_moe.Qwen3MoeSparseMoeBlock' for a class of transformers' own models, None for any other class."""
    home = cls.__module__.split(".")
    if home[:2] != ["transformers", "models"] or len(home) != 4 or home[3] != f"modeling_{home[2]}":
        return None
    return f"{home[2]}.{cls.__qualname__}"
