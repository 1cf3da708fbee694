"""The families of transformers whose classes `patch` fuses: one record each, and the lookup of a class.

Modules are recognised by their class, never by the name of an attribute, which may mislead: Laguna's router has the
name of another model's router. docs/adding.md says how to add a family.
"""

from . import routing
from . import tiny_sizes as sizes
from .attention_options import (
    in_windows,
    llama4_rotates,
    llama4_temperature,
    mistral4_temperature,
    no_weight,
    softplus,
)
from .hybrid_families import GATED_SHARED, HYBRID_FAMILIES, INDEXED
from .records import (
    Attention,
    Block,
    Experts,
    Family,
    Gemma4Attention,
    Gemma4Layer,
    LatentAttention,
    Layer,
    Llama4Block,
    Mlp,
    Norm,
)

# A reason why attention is left.
SOMETIMES_INDEXED = "in some layers an indexer selects the keys of each query (sparse attention)"

#: By the model type of the family's tiny model, or else by the folder of its classes.
FAMILIES = {
    # Softmax.
    "qwen2_moe": Family(
        block=Block("Qwen2MoeSparseMoeBlock", routing.softmax_optional, **GATED_SHARED),
        attention=Attention("Qwen2MoeAttention"),
        layer=Layer("Qwen2MoeDecoderLayer"),
        mlp=Mlp("Qwen2MoeMLP"),
        last_norm=Norm("Qwen2MoeRMSNorm"),
        tiny=sizes.QWEN_SHARED | {"norm_topk_prob": False},
    ),
    "qwen3_moe": Family(
        block=Block("Qwen3MoeSparseMoeBlock", routing.softmax_optional),
        attention=Attention("Qwen3MoeAttention", window="module"),
        layer=Layer("Qwen3MoeDecoderLayer"),
        mlp=Mlp("Qwen3MoeMLP"),
        last_norm=Norm("Qwen3MoeRMSNorm"),
        tiny=sizes.QWEN,
    ),
    "qwen3_vl_moe": Family(
        block=Block("Qwen3VLMoeTextSparseMoeBlock", routing.softmax),
        attention=Attention("Qwen3VLMoeTextAttention"),
        layer=Layer("Qwen3VLMoeTextDecoderLayer"),
        mlp=Mlp("Qwen3VLMoeTextMLP"),
        last_norm=Norm("Qwen3VLMoeTextRMSNorm"),
        tiny=sizes.QWEN,
    ),
    "qwen3_omni_moe_thinker": Family(
        folder="qwen3_omni_moe",
        block=Block("Qwen3OmniMoeThinkerTextSparseMoeBlock", routing.softmax_optional),
        attention=Attention("Qwen3OmniMoeThinkerTextAttention", window="module"),
        layer=Layer("Qwen3OmniMoeThinkerTextDecoderLayer"),
        mlp=Mlp("Qwen3OmniMoeThinkerTextMLP"),
        last_norm=Norm("Qwen3OmniMoeTextRMSNorm"),
        tiny=sizes.QWEN,
    ),
    "qwen3_omni_moe_talker": Family(
        folder="qwen3_omni_moe",
        block=Block("Qwen3OmniMoeTalkerTextSparseMoeBlock", routing.softmax_optional, **GATED_SHARED),
    ),
    "mixtral": Family(
        block=Block("MixtralSparseMoeBlock", routing.softmax),
        attention=Attention("MixtralAttention", window="config"),
        layer=Layer("MixtralDecoderLayer"),
        last_norm=Norm("MixtralRMSNorm"),
        tiny=sizes.LOCAL,
    ),
    "olmoe": Family(
        block=Block("OlmoeSparseMoeBlock", routing.softmax_optional),
        attention=Attention("OlmoeAttention", window="config"),
        layer=Layer("OlmoeDecoderLayer"),
        last_norm=Norm("OlmoeRMSNorm"),
        tiny={"num_experts": 8},
    ),
    "flex_olmo": Family(
        block=Block("FlexOlmoSparseMoeBlock", routing.softmax_optional),
        attention=Attention("FlexOlmoAttention"),
        tiny={"num_experts": 8},
    ),
    "mellum": Family(
        block=Block("MellumSparseMoeBlock", routing.softmax_optional),
        attention=Attention("MellumAttention", window="module"),
        layer=Layer("MellumDecoderLayer"),
        mlp=Mlp("MellumMLP"),
        last_norm=Norm("MellumRMSNorm"),
        tiny=sizes.QWEN | sizes.WINDOW,
    ),
    "hunyuan_v1_moe": Family(
        block=Block("HunYuanMoEV1Moe", routing.hunyuan_v1, shared="shared_mlp"),
        attention=Attention("HunYuanMoEV1Attention", norms=("query_layernorm", "key_layernorm"), norms_first=False),
        layer=Layer("HunYuanMoEV1DecoderLayer"),
        mlp=Mlp("HunYuanMoEV1MLP"),
        last_norm=Norm("HunYuanMoEV1RMSNorm"),
        tiny={"num_experts": 8, "moe_topk": [3, 3]},
    ),
    "gpt_oss": Family(
        block=Block("GptOssMLP", routing.gpt_oss, router="router", returns="output, weights"),
        attention=Attention("GptOssAttention", window="module", angles="once"),
        layer=Layer("GptOssDecoderLayer"),
        last_norm=Norm("GptOssRMSNorm"),
        experts=Experts("GptOssExperts", activation="swiglu_oai", alpha="alpha", limit="limit"),
        tiny=sizes.LOCAL,
    ),
    "granitemoe": Family(
        block=Block("GraniteMoeMoE", routing.softmax, router="router"),
        attention=Attention("GraniteMoeAttention"),
        tiny=sizes.LOCAL,
    ),
    "granitemoe_swa": Family(
        block=Block("GraniteMoeSWAMoE", routing.softmax, router="router"),
        attention=Attention("GraniteMoeSWAAttention", window="module"),
        tiny=sizes.LOCAL | sizes.WINDOW,
    ),
    "granitemoeshared": Family(
        block=Block("GraniteMoeSharedMoE", routing.softmax, router="router"),
        attention=Attention("GraniteMoeSharedAttention"),
        tiny=sizes.LOCAL | {"shared_intermediate_size": 32},
    ),
    # Softmax within groups.
    "deepseek_v2": Family(
        block=Block("DeepseekV2Moe", routing.deepseek_v2, shared="shared_experts"),
        attention=LatentAttention("DeepseekV2Attention", angles="complex"),
        layer=Layer("DeepseekV2DecoderLayer"),
        mlp=Mlp("DeepseekV2MLP"),
        last_norm=Norm("DeepseekV2RMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_ocr2": Family(
        block=Block("DeepseekOcr2TextMoe", routing.deepseek_v2, shared="shared_experts"),
        attention=Attention("DeepseekOcr2TextAttention"),
        tiny=sizes.OCR_TEXT,
    ),
    "unlimited_ocr": Family(
        block=Block("UnlimitedOcrTextMoe", routing.deepseek_v2, shared="shared_experts"),
        attention=Attention("UnlimitedOcrTextAttention"),
        tiny=sizes.OCR_TEXT | {"layer_types": ["reference_sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "mistral4": Family(
        block=Block("Mistral4MoE", routing.mistral4, shared="shared_experts"),
        attention=LatentAttention("Mistral4Attention", temperature=mistral4_temperature),
        layer=Layer("Mistral4DecoderLayer"),
        mlp=Mlp("Mistral4MLP"),
        last_norm=Norm("Mistral4RMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS | {"rope_parameters": sizes.YARN},
    ),
    # Sigmoid with a bias, within groups.
    "deepseek_v3": Family(
        block=Block("DeepseekV3MoE", routing.deepseek_v3, shared="shared_experts"),
        attention=LatentAttention("DeepseekV3Attention"),
        layer=Layer("DeepseekV3DecoderLayer"),
        mlp=Mlp("DeepseekV3MLP"),
        last_norm=Norm("DeepseekV3RMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS,
    ),
    "deepseek_v32": Family(
        block=Block("DeepseekV32MoE", routing.deepseek_v3, shared="shared_experts"),
        left={"DeepseekV32Attention": INDEXED},
    ),
    "sarvam_mla": Family(tiny=sizes.LATENT_ATTENTION | sizes.GROUPS),  # with DeepSeek V3's classes
    "dots1": Family(
        block=Block("Dots1MoE", routing.deepseek_v3, shared="shared_experts"),
        attention=Attention("Dots1Attention", window="module"),
        layer=Layer("Dots1DecoderLayer"),
        mlp=Mlp("Dots1MLP"),
        last_norm=Norm("Dots1RMSNorm"),
        tiny=sizes.GROUPS | sizes.WINDOW,
    ),
    "dots3_note_text": Family(
        folder="dots3_note",
        block=Block("Dots3NoteTextMoE", routing.deepseek_v3, shared="shared_experts"),
        left={"Dots3NoteTextAttention": INDEXED},
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS,
    ),
    "glm4_moe": Family(
        block=Block("Glm4MoeMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=Attention("Glm4MoeAttention"),
        layer=Layer("Glm4MoeDecoderLayer"),
        mlp=Mlp("Glm4MoeMLP"),
        last_norm=Norm("Glm4MoeRMSNorm"),
        tiny=sizes.GROUPS,
    ),
    "sarvam_moe": Family(tiny=sizes.GROUPS),  # with GLM-4.5's classes
    "glm4_moe_lite": Family(
        block=Block("Glm4MoeLiteMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=LatentAttention("Glm4MoeLiteAttention"),
        layer=Layer("Glm4MoeLiteDecoderLayer"),
        mlp=Mlp("Glm4MoeLiteMLP"),
        last_norm=Norm("Glm4MoeLiteRMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS,
    ),
    "glm4v_moe": Family(
        block=Block("Glm4vMoeTextMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=Attention("Glm4vMoeTextAttention"),
        layer=Layer("Glm4vMoeTextDecoderLayer"),
        mlp=Mlp("Glm4vMoeTextMLP"),
        last_norm=Norm("Glm4vMoeRMSNorm"),
    ),
    "glm_moe_dsa": Family(
        block=Block("GlmMoeDsaMoE", routing.deepseek_v3, shared="shared_experts"),
        left={"GlmMoeDsaAttention": INDEXED},
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS | sizes.INDEXER,
    ),
    "hy_v4": Family(
        block=Block("HYV4MoE", routing.deepseek_v3, shared="shared_experts"),
        experts=Experts("HYV4Experts", activation="silu", limit="swiglu_limit"),
        left={"HYV4Attention": INDEXED},
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS,
    ),
    "hy_v4_vl": Family(
        block=Block("HYV4VLMoE", routing.deepseek_v3, shared="shared_experts"),
        experts=Experts("HYV4VLExperts", activation="silu", limit="swiglu_limit"),
        left={"HYV4VLAttention": INDEXED},
    ),
    "solar_open": Family(
        block=Block("SolarOpenMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=Attention("SolarOpenAttention"),
        layer=Layer("SolarOpenDecoderLayer"),
        mlp=Mlp("SolarOpenMLP"),
        last_norm=Norm("SolarOpenRMSNorm"),
        tiny=sizes.GROUPS,
    ),
    "mimo_v2_flash": Family(
        block=Block("MiMoV2FlashMoE", routing.deepseek_v3),
        attention=Attention("MiMoV2FlashAttention", window="module"),
        layer=Layer("MiMoV2FlashDecoderLayer"),
        mlp=Mlp("MiMoV2FlashMLP"),
        last_norm=Norm("MiMoV2FlashRMSNorm"),
        tiny=sizes.GROUPS | {"v_head_dim": 8, "attention_value_scale": 0.7} | sizes.WINDOW,
    ),
    # Sigmoid, and routers of their own.
    "minimax_m2": Family(
        block=Block("MiniMaxM2SparseMoeBlock", routing.sigmoid_bias),
        attention=Attention("MiniMaxM2Attention"),
        layer=Layer("MiniMaxM2DecoderLayer"),
        last_norm=Norm("MiniMaxM2RMSNorm"),
        tiny=sizes.LOCAL | {"rotary_dim": 8},
    ),
    "minimax_m3_vl_text": Family(
        folder="minimax_m3_vl",
        block=Block("MiniMaxM3VLSparseMoeBlock", routing.minimax_m3, shared="shared_experts"),
        experts=Experts("MiniMaxM3VLExperts", activation="swiglu_oai", alpha="swiglu_alpha", limit="swiglu_limit"),
        left={"MiniMaxM3VLAttention": SOMETIMES_INDEXED},
        tiny=sizes.LOCAL | {"shared_intermediate_size": 32},
    ),
    "laguna": Family(
        block=Block("LagunaSparseMoeBlock", routing.laguna, shared="shared_experts"),
        attention=Attention("LagunaAttention", window="module", gate=softplus),
        layer=Layer("LagunaDecoderLayer"),
        mlp=Mlp("LagunaMLP"),
        last_norm=Norm("LagunaRMSNorm"),
        tiny={"num_experts": 8},
    ),
    "hy_v3": Family(
        block=Block("HYV3MoE", routing.hy_v3, shared="shared_experts"),
        attention=Attention("HYV3Attention"),
        layer=Layer("HYV3DecoderLayer"),
        mlp=Mlp("HYV3MLP"),
        last_norm=Norm("HYV3RMSNorm"),
        tiny={"num_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "flint": Family(
        block=Block("FlintSparseMoeBlock", routing.flint, shared="shared_expert"),
        attention=Attention("FlintAttention", window="module", rotates=in_windows),
        layer=Layer("FlintDecoderLayer"),
        mlp=Mlp("FlintMLP"),
        last_norm=Norm("FlintRMSNorm"),
        tiny=sizes.QWEN_SHARED | sizes.WINDOW | {"mlp_only_layers": []},
    ),
    "llama4_text": Family(
        folder="llama4",
        block=Llama4Block("Llama4TextMoe", routing.llama4, router="router", shared="shared_expert"),
        attention=Attention(
            "Llama4TextAttention",
            angles="complex",
            rotates=llama4_rotates,
            norms=("qk_norm", "qk_norm"),
            norm_weight=no_weight,
            norms_first=False,
            temperature=llama4_temperature,
        ),
        tiny=sizes.LOCAL
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
        },
    ),
    "gemma4_text": Family(
        folder="gemma4",
        attention=Gemma4Attention("Gemma4TextAttention", window="module"),
        layer=Gemma4Layer("Gemma4TextDecoderLayer"),
        mlp=Mlp("Gemma4TextMLP"),
        last_norm=Norm("Gemma4RMSNorm"),
        tiny={
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            **sizes.WINDOW,
        },
    ),
    # Only their experts run on our op.
    "openai_privacy_filter": Family(
        experts=Experts("OpenAIPrivacyFilterExperts", activation="swiglu_oai", alpha="alpha", limit="limit")
    ),
    "deepseek_v4": Family(experts=Experts("DeepseekV4Experts", limit="limit")),
    "beam": Family(experts=Experts("BeamExperts")),  # converts to float32, in which our op computes anyway
} | HYBRID_FAMILIES


def class_name(cls: type) -> str | None:
    """'qwen3_moe.Qwen3MoeSparseMoeBlock' for a class of transformers' own models, None for any other class."""
    home = cls.__module__.split(".")
    if home[:2] != ["transformers", "models"] or len(home) != 4 or home[3] != f"modeling_{home[2]}":
        return None
    return f"{home[2]}.{cls.__qualname__}"


_BY_FOLDER = [(family.folder or name, family) for name, family in FAMILIES.items()]
#: The records of all classes that are fused, by `class_name`.
RECORDS = {f"{folder}.{record.name}": record for folder, family in _BY_FOLDER for record in family.fused}
#: The classes of attention that are not fused, and the reasons.
NOT_FUSED = {f"{folder}.{name}": reason for folder, family in _BY_FOLDER for name, reason in family.left.items()}
#: The activation, alpha and limit of experts with a gate of their own, by `_apply_gate`'s name.
GATES = {
    f"{folder}.modeling_{folder}.{family.experts.name}": family.experts.gate
    for folder, family in _BY_FOLDER
    if family.experts is not None
}
