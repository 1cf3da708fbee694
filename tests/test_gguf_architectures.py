"""The meaning of a GGUF file's metadata and tensor names, with hand-written metadata, without files and models."""

import math

import pytest
import torch
from transformers import AutoConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torch_moe_metal.transformers.checkpoints.gguf.architectures import (
    CONVERSIONS,
    ExpertRows,
    JoinGateUp,
    JoinLatentHeads,
    halves,
    rotary_halves,
    rows_by_key_head,
)
from torch_moe_metal.transformers.checkpoints.gguf.config import CONFIGS, LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS

MISSING = object()
COMMON = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 96,
    "feed_forward_length": 160,
    "attention.head_count": 6,
    "attention.layer_norm_rms_epsilon": torch.tensor(3e-5).item(),
    "expert_count": 8,
    "expert_used_count": 3,
}
EXPERTS = {"expert_feed_forward_length": 64}
SHARED = EXPERTS | {"expert_shared_count": 2}
LATENT = SHARED | {
    "rope.dimension_count": 16,
    "attention.kv_lora_rank": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
}
LINEAR = {
    "ssm.conv_kernel": 3,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
    "expert_shared_feed_forward_length": 96,
}
SLIDING = {
    "attention.key_length": 64,
    "attention.key_length_swa": 32,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False],
}
# Keys that llama.cpp requires for each architecture in addition to COMMON. An old file may have only these.
OLD = {
    "deepseek2": LATENT,
    "dots1": SHARED,
    "ernie4_5-moe": EXPERTS | {"interleave_moe_layer_step": 1},
    "gemma4": EXPERTS | SLIDING,
    "glm4moe": SHARED,
    "gpt-oss": EXPERTS | {"attention.sliding_window": 8},
    "granitemoe": {"logit_scale": 4.0},
    "hunyuan-moe": EXPERTS,
    "llama4": EXPERTS | {"interleave_moe_layer_step": 1},
    "minimax-m2": EXPERTS,
    "mixtral": {},
    "olmoe": {},
    "qwen2moe": {},
    "qwen3moe": {},
    "qwen3next": LINEAR,
}


def config_of(
    arch: str, /, names: tuple[str, ...] = ("output.weight",), tensors: dict | None = None, **changes
) -> dict:
    """The configuration of an old file with these changes; two underscores mean a dot, MISSING removes a key."""
    keys = COMMON | OLD[arch] | {key.replace("__", "."): value for key, value in changes.items()}
    prefix = "llama" if arch == "mixtral" else arch
    stated = {
        key if key.startswith("tokenizer") else f"{prefix}.{key}": value
        for key, value in ({"tokenizer.ggml.tokens": 99} | keys).items()
        if value is not MISSING
    }
    return CONFIGS[arch](stated | (tensors or {}), (*names, *(tensors or {})))


def built(config: dict):
    return AutoConfig.for_model(**config)


def renamed(arch: str, name: str, **changes) -> str:
    mapping = CONVERSIONS[arch](built(config_of(arch, **changes)))
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return rename_source_key(name, renamings, [each for each in mapping if isinstance(each, WeightConverter)])[0]


def test_both_tables_have_the_same_architectures_and_not_the_dense_one():
    assert CONFIGS.keys() == CONVERSIONS.keys() == OLD.keys()
    assert "llama" not in CONFIGS


@pytest.mark.parametrize("arch", OLD)
def test_an_old_file_makes_a_configuration(arch):
    config = config_of(arch)
    known = built(config)
    assert (known.num_hidden_layers, known.hidden_size, known.vocab_size) == (3, 96, 99)
    assert known.rms_norm_eps == 3e-5  # as written, not as in float32
    assert not known.tie_word_embeddings
    assert known.bos_token_id is None and known.pad_token_id is None
    assert config_of(arch, names=())["tie_word_embeddings"]
    assert CONVERSIONS[arch](known)


# ------------------------------------------------------------------------------------------------ hostile metadata

COUNTS = ("block_count", "context_length", "embedding_length", "attention__head_count", "expert_count")
FLOATS = ("attention__layer_norm_rms_epsilon", "rope__freq_base")


@pytest.mark.parametrize("value", ["3", -1, 0, True, 2.0, [], None, [3, "3", 3], {"a": 1}])
@pytest.mark.parametrize("key", [*COUNTS, "expert_used_count", "attention__head_count_kv", "attention__key_length"])
def test_a_count_of_the_wrong_kind_raises(key, value):
    with pytest.raises(
        ValueError, match=rf"^qwen3moe\.{key.replace('__', '.')}: expected .*, got .*{type(value).__name__}"
    ):
        config_of("qwen3moe", **{key: value})


@pytest.mark.parametrize("value", ["1e-5", 0.0, -1.0, math.nan, math.inf, False, [1.0], None])
@pytest.mark.parametrize("key", FLOATS)
def test_a_number_of_the_wrong_kind_raises(key, value):
    with pytest.raises(ValueError, match=rf"^qwen3moe\.{key.replace('__', '.')}: expected a finite number"):
        config_of("qwen3moe", **{key: value})


@pytest.mark.parametrize("key", [*COUNTS, "expert_used_count", FLOATS[0], "feed_forward_length"])
def test_missing_required_keys_raise(key):
    with pytest.raises(ValueError, match=rf"^qwen3moe\.{key.replace('__', '.')}: expected .*, got no such key"):
        config_of("qwen3moe", **{key: MISSING})


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen3moe", {"expert_used_count": 9}),
        ("qwen3moe", {"block_count": 513}),
        ("qwen3moe", {"nextn_predict_layers": 3}),
        ("qwen3moe", {"attention__value_length": 5}),
        ("qwen3moe", {"rope__dimension_count": 17}),
        ("qwen3moe", {"attention__head_count_kv": [2, 2]}),
        ("qwen3moe", {"attention__head_count_kv": [2, 2, 3]}),
        ("qwen3moe", {"rope__scaling__type": "spiral"}),
        ("qwen3moe", {"rope__scaling__type": 2}),
        ("qwen3moe", {"rope__scaling__factor": -2.0}),
        ("qwen3moe", {"expert_weights_norm": 1}),
        ("glm4moe", {"expert_gating_func": 1}),
        ("minimax-m2", {"expert_gating_func": 1}),
        ("deepseek2", {"expert_gating_func": 3}),
        ("deepseek2", {"expert_weights_norm": True}),
        ("deepseek2", {"attention__temperature_scale": 0.1}),
        ("deepseek2", {"attention__key_length_mla": 16}),
        ("deepseek2", {"expert_group_count": 3}),
        ("deepseek2", {"expert_group_used_count": 2}),
        ("gemma4", {"attention__sliding_window_pattern": [1, 2, 0]}),
        ("gemma4", {"attention__sliding_window_pattern": MISSING}),
        ("gpt-oss", {"attention__sliding_window_pattern": "every other"}),
        ("qwen3next", {"ssm__inner_size": 255}),
        ("hunyuan-moe", {"expert_shared_feed_forward_length": 65}),
    ],
)
def test_contradictory_metadata_raise(arch, changes):
    (key,) = changes
    with pytest.raises(ValueError, match=rf"^{arch}\.{key.replace('__', '.')}: expected "):
        config_of(arch, **changes)


def test_unsupported_tensors_raise():
    with pytest.raises(ValueError, match=r"^blk\.0\.attn_qkv\.weight: expected"):
        config_of("qwen3moe", names=("blk.0.attn_qkv.weight",))
    with pytest.raises(ValueError, match=r"^blk\.0\.attn_q\.bias: expected no such tensor"):
        config_of("mixtral", names=("blk.0.attn_q.bias",))
    with pytest.raises(ValueError, match=r"^deepseek2\.expert_gating_func: expected 2"):
        config_of("deepseek2", names=("blk.1.exp_probs_b.bias",))


# ------------------------------------------------------------------------------------------------ values


def test_missing_keys_have_the_defaults_of_llama_cpp():
    config = config_of("qwen3moe")
    assert (config["num_key_value_heads"], config["head_dim"], config["moe_intermediate_size"]) == (6, 16, 160 // 3)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    norms = {
        arch: config_of(arch)["norm_topk_prob"] for arch in ("qwen3moe", "qwen2moe", "olmoe", "qwen3next", "glm4moe")
    }
    assert norms == {"qwen3moe": True, "qwen2moe": False, "olmoe": False, "qwen3next": True, "glm4moe": False}
    config = config_of("glm4moe")
    assert [config[key] for key in ("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor")] == [
        1,
        1,
        0,
        1,
    ]
    assert config_of("gpt-oss")["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of("qwen3next", block_count=4)["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config_of("granitemoe")["attention_multiplier"] == 0.25  # 1 / sqrt(head width)
    assert config_of("qwen2moe", expert_shared_feed_forward_length=MISSING)["shared_expert_intermediate_size"] == 160


def test_equal_values_per_layer():
    scalar = config_of("qwen3moe", attention__head_count_kv=2, expert_feed_forward_length=64)
    lists = {
        "attention__head_count_kv": [2] * 3,
        "expert_feed_forward_length": [64] * 3,
        "feed_forward_length": [160] * 3,
    }
    assert config_of("qwen3moe", **lists) == scalar


def test_vocabulary_size():
    assert config_of("qwen3moe", tokenizer__ggml__tokens=["a", "b"])["vocab_size"] == 2
    assert config_of("qwen3moe", tokenizer__ggml__tokens=MISSING, vocab_size=7)["vocab_size"] == 7
    with pytest.raises(ValueError, match=r"^tokenizer\.ggml\.tokens: expected"):
        config_of("qwen3moe", tokenizer__ggml__tokens=MISSING)


def test_special_tokens():
    ids = {"bos": 1, "eos": 2, "eot": 3, "eom": 3, "padding": 99}
    config = config_of("qwen3moe", **{f"tokenizer__ggml__{name}_token_id": number for name, number in ids.items()})
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 3])
    assert config["pad_token_id"] is None  # outside of the vocabulary
    assert config_of("qwen3moe", tokenizer__ggml__eos_token_id=2)["eos_token_id"] == 2
    assert config_of("gemma4", tokenizer__ggml__eos_token_id=2)["eos_token_id"] == [1, 106, 50]


def test_layers_for_multi_token_prediction_are_dropped():
    changes = {"block_count": 5, "nextn_predict_layers": 2, "attention__head_count_kv": [2, 2, 2, 1, 1]}
    config = config_of("glm4moe", **changes)
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (3, 2)
    assert renamed("glm4moe", "blk.2.ffn_down_exps.weight", **changes) == "model.layers.2.mlp.experts.down_proj"
    for name in ("blk.3.attn_q.weight", "blk.4.nextn.eh_proj.weight", "blk.4.ffn_gate_exps.weight"):
        assert renamed("glm4moe", name, **changes).startswith("mtp.")


QUERIES = ("output.weight", "blk.0.attn_q_a.weight")


@pytest.mark.parametrize(
    ("changes", "names", "expected"),
    [
        ({}, (), {"model_type": "deepseek_v2", "topk_method": "greedy", "q_lora_rank": None}),
        (
            {"expert_group_count": 4, "expert_group_used_count": 2, "attention__q_lora_rank": 24},
            QUERIES,
            {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "topk_group": 2, "q_lora_rank": 24},
        ),
        (
            {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5},
            (),
            {"model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1},
        ),
        (
            {"tokenizer__ggml__pre": "glm4", "leading_dense_block_count": 1},
            (),
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "sparse"]},
        ),
        ({"block_count": 47, "tokenizer__ggml__tokens": 154880}, (), {"model_type": "glm4_moe_lite"}),
    ],
)
def test_the_kinds_of_deepseek2(changes, names, expected):
    config = config_of("deepseek2", names=names, **changes)
    assert {key: config[key] for key in expected} == expected
    assert built(config).qk_nope_head_dim == 32


def test_both_layouts_of_latent_attention_have_one_configuration():
    old = {"attention__key_length": 48, "attention__value_length": 64, "attention__head_count_kv": 6}
    without = {"attention__key_length_mla": MISSING, "attention__value_length_mla": MISSING}
    assert config_of("deepseek2", **old, **without) == config_of("deepseek2")
    assert renamed("deepseek2", "blk.1.attn_kv_b.weight") == "model.layers.1.self_attn.kv_b_proj.weight"
    for half in ("attn_k_b", "attn_v_b"):
        assert renamed("deepseek2", f"blk.1.{half}.weight") == "model.layers.1.self_attn.kv_b_proj.weight"


def test_gemma4_of_shared_keys_and_of_experts():
    config = config_of(
        "gemma4", expert_count=MISSING, feed_forward_length=[160, 160, 320], attention__shared_kv_layers=1
    )
    assert not config["enable_moe_block"] and config["use_double_wide_mlp"]
    assert (config["intermediate_size"], config["num_kv_shared_layers"]) == (160, 1)
    config = config_of("gemma4", attention__head_count_kv=[3, 3, 1], tensors={ROPE_FREQS: [1.0] * 4 + [1e30] * 28})
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (3, 1)
    assert config["attention_k_eq_v"]
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.125
    assert not config_of("gemma4", names=("blk.2.attn_v.weight",))["attention_k_eq_v"]


def test_llama4_rotates_everywhere_without_a_sliding_window():
    assert config_of("llama4", block_count=4)["no_rope_layers"] == [1, 1, 1, 0]
    config = config_of("llama4", attention__sliding_window=0, block_count=4)
    assert (config["no_rope_layers"], config["attn_temperature_tuning"]) == ([1] * 4, False)
    assert not config_of("llama4", expert_count=128)["use_qk_norm"]


# ------------------------------------------------------------------------------------------------ rotary embedding


def rope_of(arch: str = "qwen3moe", **changes) -> dict:
    return config_of(arch, **changes)["rope_parameters"]


def scaling(**keys) -> dict:
    return {f"rope__scaling__{key}": value for key, value in keys.items()}


def test_rope_scaling():
    assert rope_of(**scaling(type="linear", factor=2.0)) == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 2.0,
    }
    assert rope_of(rope__scale_linear=2.0)["rope_type"] == "linear"  # the old name of the key, and no type
    assert rope_of(**scaling(type="none", factor=4.0))["rope_type"] == "default"
    yarn = rope_of(**scaling(type="yarn", factor=4.0))
    assert [yarn[key] for key in ("beta_fast", "beta_slow", "original_max_position_embeddings")] == [32.0, 1.0, 256]
    assert "attention_factor" not in yarn
    stated = scaling(type="yarn", factor=4.0, original_context_length=64, yarn_beta_fast=24.0, yarn_attn_factor=1.25)
    yarn = rope_of(**stated)
    assert [yarn[key] for key in ("beta_fast", "original_max_position_embeddings", "attention_factor")] == [
        24.0,
        64,
        1.25,
    ]
    further = rope_of(**scaling(type="yarn", factor=4.0, attn_factor=2.0))["attention_factor"]
    assert further == 2 * (0.1 * math.log(4) + 1)
    assert rope_of("gpt-oss", **scaling(type="yarn", factor=32.0))["truncate"] is False
    assert rope_of("glm4moe", rope__dimension_count=8)["partial_rotary_factor"] == 0.5
    assert rope_of("glm4moe")["partial_rotary_factor"] == 1.0


def test_deepseeks_yarn_has_a_tenth_of_mscale():
    multiplier = torch.tensor(0.07).item()
    rope = rope_of("deepseek2", **scaling(type="yarn", factor=40.0, yarn_log_multiplier=multiplier))
    assert rope["mscale"] == rope["mscale_all_dim"] == 0.7
    assert "mscale" not in rope_of("deepseek2", **scaling(type="yarn", factor=40.0))


def test_longrope_has_two_tensors():
    tensors = {LONG_FACTORS: [2.0] * 8, SHORT_FACTORS: [1.0] * 8}
    rope = rope_of(tensors=tensors, **scaling(type="longrope", original_context_length=64))
    assert (rope["long_factor"], rope["short_factor"], rope["factor"]) == ([2.0] * 8, [1.0] * 8, 4.0)
    with pytest.raises(ValueError, match=rf"^{LONG_FACTORS}: expected a list"):
        rope_of(**scaling(type="longrope"))


# The limits of the last three leave one frequency between them, none, and none above.
@pytest.mark.parametrize("borders", [(1.0, 4.0, 64), (1.0, 1.2, 64), (1.0, 1.0, 64), (1.0, 1.0, 2)])
def test_llama3_scaling_from_divisors(borders):
    low, high, original = borders
    stated = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": low}
    stated |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    frequencies = ROPE_INIT_FUNCTIONS["llama3"]
    config = built(config_of("mixtral"))
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    config.rope_parameters = stated
    expected, _ = frequencies(config, "cpu")
    divisors = (plain / expected).tolist()
    config.rope_parameters = config_of("mixtral", tensors={ROPE_FREQS: divisors})["rope_parameters"]
    found, _ = frequencies(config, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_divisors_of_frequencies_are_checked():
    with pytest.raises(ValueError, match=rf"^{ROPE_FREQS}: expected the tensor's values"):
        config_of("mixtral", names=(ROPE_FREQS,))
    for divisors in ([1.0] * 7, [0.5] * 8, ["1"] * 8):
        with pytest.raises(ValueError, match=rf"^{ROPE_FREQS}: expected"):
            config_of("mixtral", tensors={ROPE_FREQS: divisors})
    assert config_of("mixtral", tensors={ROPE_FREQS: [1.0] * 8})["rope_parameters"]["rope_type"] == "default"


# ------------------------------------------------------------------------------------------------ tensors


@pytest.mark.parametrize(
    ("arch", "name", "expected"),
    [
        ("mixtral", "token_embd.weight", "model.embed_tokens.weight"),
        ("mixtral", "output_norm.weight", "model.norm.weight"),
        ("mixtral", "output.weight", "lm_head.weight"),
        ("mixtral", "blk.2.attn_k.weight", "model.layers.2.self_attn.k_proj.weight"),
        ("qwen3moe", "blk.0.ffn_up_exps.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("qwen3next", "output_norm.weight", "model.norm.weight"),
        ("qwen3next", "blk.0.ssm_in.weight", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3next", "blk.0.attn_gate.weight", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3next", "blk.0.ffn_gate_up_exps.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3next", "blk.0.ssm_a", "model.layers.0.linear_attn.A_log"),
        ("gpt-oss", "blk.0.ffn_gate_exps.bias", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("gpt-oss", "blk.0.ffn_down_exps.bias", "model.layers.0.mlp.experts.down_proj_bias"),
        ("gpt-oss", "blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks"),
        ("gpt-oss", "blk.0.attn_output.bias", "model.layers.0.self_attn.o_proj.bias"),
        ("glm4moe", "blk.0.exp_probs_b.bias", "model.layers.0.mlp.gate.e_score_correction_bias"),
        ("minimax-m2", "blk.0.exp_probs_b.bias", "model.layers.0.mlp.e_score_correction_bias"),
        ("gemma4", "blk.0.proj.weight", "model.layers.0.per_layer_projection.weight"),
        ("gemma4", "blk.0.ffn_gate_inp.weight", "model.layers.0.router.proj.weight"),
        ("gemma4", "blk.0.ffn_gate_inp.scale", "model.layers.0.router.scale"),
        ("gemma4", "blk.0.ffn_down_exps.scale", "model.layers.0.router.per_expert_scale"),
        ("gemma4", "per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
        ("granitemoe", "blk.0.ffn_up_shexp.weight", "model.layers.0.shared_mlp.input_linear.weight"),
        ("llama4", "blk.0.ffn_up_shexp.weight", "model.layers.0.feed_forward.shared_expert.up_proj.weight"),
    ],
)
def test_tensor_names(arch, name, expected):
    assert renamed(arch, name) == expected


GATE, UP = torch.arange(24.0).reshape(2, 3, 4), 100 + torch.arange(24.0).reshape(2, 3, 4)


def converted(operation, *tensors):
    return operation.convert(
        {str(i): [each] for i, each in enumerate(tensors)}, [*map(str, range(len(tensors)))], ["t"]
    )["t"]


def test_gate_and_up_in_the_modules_layout():
    plain = converted(JoinGateUp(), GATE, UP)
    assert torch.equal(plain, torch.cat((GATE, UP), 1))
    assert torch.equal(converted(JoinGateUp(transposed=True), GATE, UP), plain.mT)
    turned = converted(JoinGateUp(transposed=True, interleaved=True), GATE, UP)
    assert turned.shape == (2, 4, 6)
    assert torch.equal(turned[..., ::2], GATE.mT) and torch.equal(turned[..., 1::2], UP.mT)
    biases = converted(JoinGateUp(interleaved=True), GATE[..., 0], UP[..., 0])
    assert torch.equal(biases[:, ::2], GATE[..., 0]) and torch.equal(biases[:, 1::2], UP[..., 0])


@pytest.mark.parametrize("operation", [JoinGateUp(), JoinGateUp(transposed=True, interleaved=True)])
def test_packed_gate_and_up_stay_separate(operation):
    gate, up = GATE.byte(), UP.byte()
    joined = converted(operation, gate, up)
    assert joined.shape == (2, 2, 3, 4) and operation.supports_packed
    assert torch.equal(joined[:, 0], gate) and torch.equal(joined[:, 1], up)


def test_halves_of_one_storage_are_not_copied():
    pages = torch.arange(64, dtype=torch.uint8)
    gate, up = pages[:24].view(2, 3, 4), pages[30:54].view(2, 3, 4)
    joined = halves(gate, up)
    assert torch.equal(joined, torch.stack((gate, up), 1)) and joined.data_ptr() == gate.data_ptr()


def test_dense_down_rows_are_transposed():
    assert torch.equal(converted(ExpertRows(True), GATE), GATE.mT)
    assert torch.equal(converted(ExpertRows(False), GATE), GATE)
    assert torch.equal(converted(ExpertRows(True), GATE.byte()), GATE.byte())


@pytest.mark.parametrize("flat", [False, True])
def test_halves_of_latent_heads(flat):
    whole = torch.randn(3 * (4 + 2), 5)
    keys, values = whole.view(3, 6, 5).split((4, 2), 1)
    keys = keys.mT  # as in llama.cpp
    halves = (keys.reshape(15, 4), values.reshape(6, 5)) if flat else (keys, values)
    assert torch.equal(converted(JoinLatentHeads(heads=3, rank=5), *halves), whole)


def test_rotated_pairs_and_grouped_rows_round_trip():
    weight = torch.randn(3 * 8, 5)
    permuted = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)  # llama.cpp's LlamaModel.permute
    assert torch.equal(converted(rotary_halves(3, 8), permuted), weight)
    config = built(config_of("qwen3next"))
    grouped = torch.randn(2 * (32 + 32 + 2 * 64 + 2 * 64), 5)
    parts = grouped.view(2, -1, 5).split((32, 32, 128, 128), 1)  # llama.cpp's split of in_proj_qkvz
    stored = torch.cat([part.reshape(-1, 5) for part in parts])
    assert torch.equal(stored[rows_by_key_head(config)], grouped)
