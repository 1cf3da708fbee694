"""The families with mixers that keep a recurrent state instead of keys and values: part of `families.FAMILIES`."""

from . import linear_options as linear
from . import routing
from . import tiny_sizes as sizes
from .attention_options import in_windows, never, one_plus_weight, with_rope
from .records import (
    Attention,
    Block,
    Experts,
    Family,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba2,
    Mlp,
    Norm,
    ShortConv,
)

GATED_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}
# Reasons why mixers and attention are left.
RECURRENT = "it keeps a recurrent state instead of keys and values"
INDEXED = "its indexer selects the keys of each query (sparse attention)"

#: Qwen3.5's gated delta net, which other models have as well.
DELTA_NET = {
    "projections": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "sizes": linear.delta_net_sizes,
    "split": linear.delta_net,
    "parameters": linear.delta_net_parameters,
}
GROUPED_DELTA_NET = DELTA_NET | {"projections": ("in_proj_qkvz", "in_proj_ba"), "split": linear.grouped_delta_net}
#: Kimi's delta attention.
CHANNEL_DELTA = {
    "projections": ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_proj", "g_proj"),
    "sizes": linear.channel_sizes,
    "split": linear.channel_delta,
    "parameters": linear.channel_parameters,
    "norm": "o_norm",
    "output": "o_proj",
    "read": ("conv1d", "forget_gate"),
    "by_channel": True,
}
LOW_RANK_DELTA = CHANNEL_DELTA | {
    "projections": ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj"),
    "split": linear.low_rank_channel_delta,
}

HYBRID_FAMILIES = {
    "qwen3_next": Family(
        block=Block("Qwen3NextSparseMoeBlock", routing.softmax_optional, **GATED_SHARED),
        attention=Attention("Qwen3NextAttention", norm_weight=one_plus_weight, gate="sigmoid"),
        linear=LinearAttention("Qwen3NextGatedDeltaNet", **GROUPED_DELTA_NET),
        layer=Layer("Qwen3NextDecoderLayer", mixers=("linear_attn", "self_attn"), norm_weight=one_plus_weight),
        mlp=Mlp("Qwen3NextMLP"),
        last_norm=Norm("Qwen3NextRMSNorm", norm_weight=one_plus_weight),
        tiny=sizes.QWEN_SHARED | sizes.LINEAR_ATTENTION,
    ),
    "qwen3_5_moe_text": Family(
        folder="qwen3_5_moe",
        block=Block("Qwen3_5MoeSparseMoeBlock", routing.softmax, **GATED_SHARED),
        attention=Attention("Qwen3_5MoeAttention", norm_weight=one_plus_weight, gate="sigmoid"),
        linear=LinearAttention("Qwen3_5MoeGatedDeltaNet", **DELTA_NET),
        layer=Layer("Qwen3_5MoeDecoderLayer", mixers=("linear_attn", "self_attn"), norm_weight=one_plus_weight),
        mlp=Mlp("Qwen3_5MoeMLP"),
        last_norm=Norm("Qwen3_5MoeRMSNorm", norm_weight=one_plus_weight),
        tiny=sizes.QWEN_SHARED | sizes.LINEAR_ATTENTION,
    ),
    "qwen4_exp": Family(
        block=Block("Qwen4ExpTextSparseMoeBlock", routing.softmax_optional, **GATED_SHARED),
        linear=LinearAttention("Qwen4ExpTextGatedDeltaNet", **DELTA_NET),
        left={"Qwen4ExpTextAttention": INDEXED},
    ),
    "minimax": Family(
        block=Block("MiniMaxSparseMoeBlock", routing.softmax),
        attention=Attention("MiniMaxAttention", window="config"),
        left={"MiniMaxLightningAttention": RECURRENT},
        tiny=sizes.LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    ),
    "jamba": Family(
        block=Block("JambaSparseMoeBlock", routing.unnormalized, router="router"),
        attention=Attention("JambaAttention", rotates=never),
        left={"JambaMambaMixer": RECURRENT},
        tiny=sizes.QWEN | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "granitemoehybrid": Family(
        block=Block("GraniteMoeHybridMoE", routing.softmax, router="router"),
        attention=Attention("GraniteMoeHybridAttention", rotates=with_rope),
        linear=Mamba2("GraniteMoeHybridMambaLayer"),
        layer=Layer(
            "GraniteMoeHybridDecoderLayer",
            mixers=("mamba", "self_attn"),
            mlp="block_sparse_moe",
            multiplier="residual_multiplier",
            shared="shared_mlp",
        ),
        mlp=Mlp("GraniteMoeHybridMLP", inputs=("input_linear",), output="output_linear", activation="activation"),
        last_norm=Norm("GraniteMoeHybridRMSNorm"),
        tiny=sizes.LOCAL | sizes.MAMBA | {"shared_intermediate_size": 32},
    ),
    "lara_mini": Family(
        block=Block("LaraMiniSparseMoeBlock", routing.softmax_optional, shared="shared_expert"),
        attention=Attention("LaraMiniAttention", window="module", rotates=in_windows),
        linear=LinearAttention("LaraMiniGatedDeltaNet", **DELTA_NET),
        layer=Layer("LaraMiniDecoderLayer", mixers=("linear_attn", "self_attn")),
        mlp=Mlp("LaraMiniMLP"),
        last_norm=Norm("LaraMiniRMSNorm"),
        tiny=sizes.QWEN_SHARED | sizes.DELTA_NET | sizes.HYBRID_WINDOW,
    ),
    "bailing_hybrid": Family(
        block=Block("BailingHybridMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=LatentAttention("BailingHybridAttention", gate="sigmoid"),
        linear=LinearAttention("BailingHybridDeltaAttention", decay=linear.bailing_decay, **CHANNEL_DELTA),
        layer=Layer("BailingHybridDecoderLayer"),
        mlp=Mlp("BailingHybridMLP"),
        last_norm=Norm("BailingHybridRMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS | sizes.DELTA_ATTENTION,
    ),
    "kimi_linear": Family(
        block=Block("KimiLinearMoE", routing.deepseek_v3, shared="shared_experts"),
        attention=LatentAttention("KimiLinearAttention", rotates=never),
        linear=LinearAttention("KimiLinearDeltaAttention", **LOW_RANK_DELTA),
        layer=Layer("KimiLinearDecoderLayer"),
        mlp=Mlp("KimiLinearMLP"),
        last_norm=Norm("KimiLinearRMSNorm"),
        tiny=sizes.LATENT_ATTENTION | sizes.GROUPS | sizes.DELTA_ATTENTION,
    ),
    "glm5_next": Family(
        block=Block("Glm5NextTextMoE", routing.deepseek_v3, shared="shared_experts"),
        experts=Experts("Glm5NextTextExperts", activation="silu", limit="swiglu_limit"),
        linear=LinearAttention("Glm5NextTextLinearAttention", decay=linear.glm5_decay, **LOW_RANK_DELTA),
        left={"Glm5NextTextAttention": INDEXED},
    ),
    "lfm2_moe": Family(
        block=Block("Lfm2MoeSparseMoeBlock", routing.lfm2),
        attention=Attention("Lfm2MoeAttention", norms=("q_layernorm", "k_layernorm"), output="out_proj"),
        linear=ShortConv("Lfm2MoeShortConv"),
        layer=Layer(
            "Lfm2MoeDecoderLayer",
            mixers=("conv", "self_attn"),
            mlp="feed_forward",
            norms=("operator_norm", "ffn_norm"),
        ),
        mlp=Mlp("Lfm2MoeMLP", inputs=("w1", "w3"), output="w2", activation=None),
        last_norm=Norm("Lfm2MoeRMSNorm"),
        tiny=sizes.QWEN | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    ),
    "nemotron_h": Family(linear=Mamba2("NemotronHMamba2Mixer"), tiny=sizes.NEMOTRON),
}
