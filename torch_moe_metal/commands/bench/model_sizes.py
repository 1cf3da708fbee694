"""The one table of model sizes: the sizes with which a layer of each model calls `gate`, `experts` and `linear`.

They are the sizes of the published checkpoints, which can differ from transformers' defaults (OLMoE's I is 2048, the
default is 1024). E experts, K experts per token, H hidden, I expert inner size, S the shared expert's inner size.

`query` is the weight that computes the attention's queries, as stored in the checkpoint, [rows, columns]: q_proj,
including an output gate if it contains one (Qwen3-Next and 3.5), and for Gemma 4 that of a layer with a sliding window;
with low-rank queries (DeepSeek V3, GLM-4.7-Flash) it is q_b_proj. `vocabulary` is the number of rows of the head.

`heads` are the sizes of `attention` in such a layer: query heads, key heads, and the sizes of a key and a value.
Low-rank keys are one head for all queries, as in the cache. `angles` is the number of pairs of a head that `rope`
rotates, and `head_norms` says what it normalises before: each head, or all heads of a token together.
"""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Model:
    """The sizes and options of one MoE layer, named as in the ops."""

    config: str  # the model type of transformers, and its class of the block
    block: str
    E: int
    K: int
    H: int
    I: int
    query: tuple[int, int]
    vocabulary: int
    S: int = 0
    tensors: tuple[str, ...] = ()  # optional tensors of `gate` and `experts`; shared_gate: the shared expert has a gate
    routing: dict = field(default_factory=dict)  # options of `gate`
    experts: dict = field(default_factory=dict)  # options of `experts`
    heads: tuple[int, int, int, int] = (32, 4, 128, 128)
    sinks: bool = False
    angles: int = 64
    head_norms: str = ""  # "" (none), "each" or "all"
    layers: int = 0  # of the published checkpoint; 0 if the configuration in this package is incomplete
    context: int = 0  # its maximum; 0 for transformers' default
    quantization: str = ""  # the quant_method of the published checkpoint

    @property
    def low_rank(self) -> bool:
        return self.heads[2] > self.heads[3]

    @property
    def attention(self) -> dict[str, int]:
        """The heads by transformers' names. Low-rank attention has more sizes, which are transformers' defaults."""
        queries, keys, size, _ = self.heads
        grouped = {} if self.low_rank else {"num_key_value_heads": keys, "head_dim": size}
        return {"num_attention_heads": queries, **grouped}

    @property
    def fewest(self) -> int:
        """The minimum number of experts that K can be selected from, group limits included. Two experts of each
        group count."""
        groups, kept = self.routing.get("n_group", 1), self.routing.get("topk_group", 1)
        return groups * max(-(-self.K // kept), 2 if groups > 1 else 1)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of matrices for `linear`: one that every layer has, and the largest one of the model."""
        return {"query": self.query, "head": (self.vocabulary, self.H)}

    @property
    def packed(self) -> "Model":
        """The same model with packed weights, which are never transposed."""
        return replace(self, experts={name: value for name, value in self.experts.items() if name != "transposed"})

    def reduced(self, *, H: int, **sizes: int) -> "Model":
        """The same model with other sizes. S becomes I if there is a shared expert, and `linears` follow H."""
        shared = sizes.get("I", self.S) if self.S else 0
        return replace(
            self, H=H, S=shared, query=(2 * H, H), vocabulary=3 * H, heads=(4, 2, 32, 32), angles=16, **sizes
        )


SIGMOID = {"scoring": "sigmoid"}
GPT_OSS = {
    "query": (4096, 2880),
    "vocabulary": 201088,
    "tensors": ("router_bias", "gate_up_bias", "down_bias"),
    "experts": {"activation": "swiglu_oai", "limit": 7.0, "interleaved": True, "transposed": True},
    "heads": (64, 8, 64, 64),
    "angles": 32,
    "sinks": True,
    "quantization": "mxfp4",
}
GROUPS = {"n_group": 8, "topk_group": 4, "scaling_factor": 2.5}

MODELS = {
    "qwen3-30b-a3b": Model("qwen3_moe", "Qwen3MoeSparseMoeBlock", 128, 8, 2048, 768, (4096, 2048), 151936,
                           head_norms="each", layers=48, context=40960),
    "qwen3-235b-a22b": Model("qwen3_moe", "Qwen3MoeSparseMoeBlock", 128, 8, 4096, 1536, (8192, 4096), 151936,
                             heads=(64, 4, 128, 128), head_norms="each", layers=94, context=40960),
    "qwen3-next-80b-a3b": Model(
        "qwen3_next", "Qwen3NextSparseMoeBlock", 512, 10, 2048, 512, (8192, 2048), 151936, 512, ("shared_gate",),
        heads=(16, 2, 256, 256), angles=32, head_norms="each", layers=48, context=262144,
    ),
    "qwen3.5-35b-a3b": Model(
        "qwen3_5_moe_text", "Qwen3_5MoeSparseMoeBlock", 256, 8, 2048, 512, (8192, 2048), 248320, 512, ("shared_gate",),
        heads=(16, 2, 256, 256), angles=32, head_norms="each", layers=40, context=262144,
    ),
    "mixtral-8x7b": Model("mixtral", "MixtralSparseMoeBlock", 8, 2, 4096, 14336, (4096, 4096), 32000,
                          heads=(32, 8, 128, 128), layers=32, context=32768),
    "olmoe": Model(
        "olmoe", "OlmoeSparseMoeBlock", 64, 8, 2048, 1024, (2048, 2048), 50304, routing={"renormalize": "none"},
        heads=(16, 16, 128, 128), head_norms="all", layers=16, context=4096,
    ),
    "gpt-oss-20b": Model("gpt_oss", "GptOssMLP", 32, 4, 2880, 2880, layers=24, **GPT_OSS),
    "gpt-oss-120b": Model("gpt_oss", "GptOssMLP", 128, 4, 2880, 2880, layers=36, **GPT_OSS),
    # Only its router and experts, because transformers has no class for the block. The dense MLP and the norms are left
    # out.
    "gemma4-26b-a4b": Model(
        "gemma4_text", "Gemma4TextExperts", 128, 8, 2816, 704, (4096, 2816), 262144,
        tensors=("norm_weight", "per_expert_scale"), experts={"activation": "gelu_tanh"},
        heads=(16, 8, 256, 256), angles=128, head_norms="each",
    ),
    "deepseek-v3": Model(
        "deepseek_v3", "DeepseekV3MoE", 256, 8, 7168, 2048, (24576, 1536), 129280, 2048, ("select_bias",),
        SIGMOID | GROUPS, heads=(128, 1, 576, 512), angles=32, layers=61, context=163840,
    ),
    "glm-4.5-air": Model(
        "glm4_moe", "Glm4MoeMoE", 128, 8, 4096, 1408, (12288, 4096), 151552, 1408, ("select_bias",), SIGMOID,
        heads=(96, 8, 128, 128), angles=32, layers=46, context=131072,
    ),
    "glm-4.7-flash": Model(
        "glm4_moe_lite", "Glm4MoeLiteMoE", 64, 4, 2048, 1536, (5120, 768), 154880, 1536, ("select_bias",),
        SIGMOID | {"scaling_factor": 1.8}, heads=(20, 1, 576, 512), angles=32, layers=47, context=202752,
    ),
    "minimax-m2": Model(
        "minimax_m2", "MiniMaxM2SparseMoeBlock", 256, 8, 3072, 1536, (6144, 3072), 200064, 0, ("select_bias",), SIGMOID,
        heads=(48, 8, 128, 128), angles=32, head_norms="all", layers=62, context=196608,
    ),
}  # fmt: skip
DEFAULT = "qwen3-30b-a3b"
MANY_EXPERTS = "qwen3-next-80b-a3b"  # 512


#: The names of our sizes in transformers' configurations.
CALLED = {
    "E": ("num_experts", "num_local_experts", "n_routed_experts"),
    "K": ("num_experts_per_tok", "top_k_experts"),
    "I": ("moe_intermediate_size", "intermediate_size"),
}


def configuration(model: Model) -> dict:
    """Our sizes and options under every name that transformers has for them; a configuration uses those that it
    knows."""
    routing = model.routing
    return {
        **{name: getattr(model, letter) for letter, names in CALLED.items() for name in names},
        "hidden_size": model.H,
        "shared_expert_intermediate_size": model.S,
        "n_shared_experts": model.S // model.I,
        "norm_topk_prob": routing.get("renormalize") != "none",
        "routed_scaling_factor": routing.get("scaling_factor", 1.0),
        "n_group": routing.get("n_group", 1),
        "topk_group": routing.get("topk_group", 1),
    }


def of_config(config: dict) -> Model:
    """The model of a checkpoint's config.json. Anything that is not in it is taken from a model above of the same
    type."""
    config = config | config.get("text_config", {})

    def size(*names: str) -> int:
        found = next((config[name] for name in names if isinstance(config.get(name), int)), 0)
        if found < 1:
            raise ValueError(
                f"this config.json has no {' or '.join(names)}: it is not a known Mixture-of-Experts model"
            )
        return found

    kind, sizes = config.get("model_type", ""), {letter: size(*names) for letter, names in CALLED.items()}
    heads, H = size("num_attention_heads"), size("hidden_size")
    shared = config.get("shared_expert_intermediate_size") or sizes["I"] * (config.get("n_shared_experts") or 0)
    sizes |= {"H": H, "S": shared, "vocabulary": size("vocab_size")}
    D, low_rank = config.get("head_dim") or H // heads, config.get("kv_lora_rank")
    sizes["query"] = (heads * D, H)
    sizes["heads"] = (heads, config.get("num_key_value_heads") or heads, D, D)
    rope = config | (config.get("rope_parameters") or {})
    turns = rope.get("qk_rope_head_dim") or rope.get("rotary_dim") or int(D * (rope.get("partial_rotary_factor") or 1))
    sizes["angles"] = max(1, turns // 2)
    if low_rank:
        sizes["heads"] = (heads, 1, low_rank + config.get("qk_rope_head_dim", 0), low_rank)
    alike = next((model for model in MODELS.values() if model.config == kind), None)
    return replace(alike, **sizes) if alike else Model(kind, "", **sizes)
