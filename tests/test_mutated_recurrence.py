"""Broken shaders of linear_attention_ and short_conv_. For each there is a test that must fail; test_mutated_readers.py
says how they run."""

from collections.abc import Callable

import pytest

import test_linear_attention_mps as suite
from test_mutated_readers import Mutant, assert_detected, only_simulated, run_test

pytestmark = [pytest.mark.slow, only_simulated]

Test = tuple[Callable, dict]


def cut(name: str, W: int = 4) -> Test:
    return suite.test_every_division_of_the_work, {"name": name, "W": W}


def channels(name: str) -> Test:
    return suite.test_decays_per_channel, {"name": name}


def groups(name: str, each_head: bool) -> Test:
    return suite.test_sum_with_norms_of_groups, {"name": name, "each_head": each_head}


def replayed(name: str, channels: bool = False) -> Test:
    return suite.test_replayed_tokens_have_equal_bits, {"name": name, "channels": channels}


def convolution(T: int, W: int, dilation: int) -> Test:
    return suite.test_short_convolutions, {"T": T, "W": W, "dilation": dilation}


MASKED = suite.test_nan_of_masked_tokens_is_not_read, {}
PACKED = suite.test_sequences_have_equal_bits_alone_and_packed, {}
OUTSIDE = suite.test_tokens_outside_of_sequences_with_norms_of_groups, {"long": True}
LAYOUTS = suite.test_layouts_of_the_state, {"name": "keys of 128"}
TAPS = suite.test_nan_reaches_as_many_tokens_as_there_are_taps, {"W": 3}
INFINITE = suite.test_infinite_state, {}
NO_TOKENS = suite.test_no_tokens, {}

DECAY = "  decay_state<KeyParts>(tile, token, gates.decay, lane, params);\n"
SEEN = "  const float4 seen = product_of_rows<KeyParts>(tile, token, lane, params);\n"
UPDATE = "  update_state<KeyParts>(tile, token, gates.beta * load4_aligned(values), lane, params);\n"
MUTANTS = {
    # inputs
    "tap_skipped": Mutant("n < missing ? 0 :", "n <= missing ? 0 :", "values", *cut("keys of 64")),
    "tap_of_many_skipped": Mutant(
        "for (uint i = 0; i < params.W; ++i)",
        "for (uint i = 1; i < params.W; ++i)",
        "values",
        *cut("keys of 64", 6),
    ),
    "missing_taps_multiplied": Mutant("n < missing ? 0 : fma", "fma", "values", *TAPS),
    "past_from_the_wrong_row": Mutant("ulong(params.W - 1) * params.past.row", "0", "bounds", *cut("keys of 64")),
    "bias_of_the_first_channel": Mutant(
        "channel.index, params.conv_bias", "0, params.conv_bias", "values", *cut("keys of 128")
    ),
    "order_ignored": Mutant("params.order == ChannelOrder::qkv", "true", "values", *groups("keys of 64", True)),
    "mask_ignored": Mutant("if (is_masked &&", "if (false &&", "values", *MASKED),
    "queries_masked": Mutant(
        "params.has_mask && (channel.part == Part::key || channel.part == Part::value)",
        "params.has_mask",
        "values",
        *cut("keys of 128"),
    ),
    "past_of_missing_taps": Mutant("max(n, window.missing + 1)", "n", "bounds", *TAPS),
    "bias_of_the_decay_forgotten": Mutant("part + simd_shuffle_xor(part, 1)", "part", "values", *cut("keys of 64")),
    "factors_of_the_first_token": Mutant("at.lane / kFactorParts", "0", "race", *cut("keys of 64")),
    "gate_not_activated": Mutant("if (is_gate) x =", "if (false) x =", "values", *cut("keys of 64")),
    "inputs_not_loaded_ahead": Mutant("if (t < count) inputs[t]", "if (t < 1) inputs[t]", "values", *cut("keys of 64")),
    "norm_of_keys_for_queries": Mutant(
        "factors.y * params.scale", "factors.x * params.scale", "values", *cut("keys of 128")
    ),
    "scale_forgotten": Mutant("factors.y * params.scale", "factors.y", "values", *cut("keys of 128")),
    "step_forgotten": Mutant(
        "gates.beta * load4_aligned(values)", "load4_aligned(values)", "values", *groups("keys of 64", True)
    ),
    "step_has_no_limit": Mutant("step > params.step_max", "false", "values", *groups("keys of 128", True)),
    "sigmoid_as_softplus": Mutant("== DecayKind::sigmoid", "== DecayKind(7)", "values", *channels("keys of 64")),
    "bias_of_the_first_head": Mutant(
        "? ulong(work.head) * params.D : work.head;", "? 0 : 0;", "values", *cut("keys of 128")
    ),
    "biases_of_the_first_head": Mutant(
        "? ulong(work.head) * params.D + d : work.head;\n  return raw",
        "? d : 0;\n  return raw",
        "values",
        *channels("keys of 128"),
    ),
    # the state
    "sum_before_the_decay": Mutant(DECAY + SEEN, SEEN + DECAY, "values", *cut("keys of 64")),
    "decay_after_the_update": Mutant(DECAY + UPDATE, UPDATE + DECAY, "values", *groups("keys of 64", True)),
    "decay_forgotten": Mutant(DECAY + SEEN, SEEN, "values", *cut("keys of 192")),
    "decay_of_the_first_channels": Mutant(
        "load4_aligned(decays + row)", "load4_aligned(decays)", "values", *channels("keys of 128")
    ),
    "beta_forgotten": Mutant("gates.beta * (*value - sum.x)", "*value - sum.x", "values", *cut("keys of 128")),
    "product_left_out": Mutant("fma(gates.product, update, sum.y)", "sum.y", "values", *cut("keys of 128")),
    "key_part_dropped": Mutant("if (KeyParts > 4) sum += simd_shuffle_xor(sum, 4);", "", "values", *cut("keys of 128")),
    "eight_key_parts_dropped": Mutant(
        "if (KeyParts > 8) sum += simd_shuffle_xor(sum, 8);", "", "values", *cut("keys of 192")
    ),
    "columns_exchanged": Mutant(
        "float4(others, two) : float4(two, others)",
        "float4(two, others) : float4(others, two)",
        "values",
        *cut("keys of 64"),
    ),
    "rows_beyond_the_last": Mutant("zero_rows<KeyParts>(tile, lane, params);\n}", "}", "values", *INFINITE),
    "sixteen_key_parts_dropped": Mutant(
        "if (KeyParts > 16) sum += simd_shuffle_xor(sum, 16);", "", "values", *cut("keys of 192")
    ),
    "not_transposed": Mutant("return transpose(tile);", "return;", "values", *LAYOUTS),
    "state_overrun": Mutant(
        "StateLayout::any && row < params.D && column < columns", "StateLayout::any", "bounds", *cut("any rows")
    ),
    "state_overwritten": Mutant(
        "exists = row < params.D && column < columns", "exists = true", "bounds", *cut("any rows")
    ),
    "not_stored": Mutant("step + count == stored)", "false)", "values", *cut("keys of 64")),
    # blocks
    "last_block_as_long_as_others": Mutant(
        "min(params.block_tokens, end - step)", "params.block_tokens", "race", *cut("keys of 64")
    ),
    "last_token_of_a_block": Mutant(
        "for (uint t = 0; t < count; ++t) {\n    threadgroup float* token",
        "for (uint t = 0; t + (count == 1) < count; ++t) {\n    threadgroup float* token",
        "values",
        *cut("keys of 64"),
    ),
    "previous_block_overwritten": Mutant(
        "threadgroup_barrier(mem_flags::mem_threadgroup);  // until the previous",
        "// until the previous",
        "race",
        *cut("keys of 64"),
    ),
    # the log
    "replay_one_row_short": Mutant(
        "for (uint t = 0; t < count; ++t) {\n        replay_token",
        "for (uint t = 1; t < count; ++t) {\n        replay_token",
        "values",
        *replayed("keys of 128"),
    ),
    "replay_without_decay": Mutant(
        "  decay_state<KeyParts>(tile, token, decay, lane, params);\n", "", "values", *replayed("keys of 128")
    ),
    "log_from_the_wrong_row": Mutant("? replay + step - stored", "? step - stored", "race", *replayed("any rows")),
    "log_of_both_heads": Mutant("if (work.has_key_head) to[", "if (true) to[", "race", *replayed("keys of 128")),
    "decays_of_the_first_head": Mutant(
        "log_decays(params) + ulong(work.head) *",
        "log_decays(params) + 0 *",
        "race",
        *replayed("keys of 128", True),
    ),
    # what is kept, and sequences
    "kept_from_the_wrong_row": Mutant(
        "- int(params.R) + int(r)", "- int(params.R) + int(r) - (r > 0 ? 1 : 0)", "values", *cut("keys of 64")
    ),
    "kept_without_past": Mutant("if (s < 0 && !has_past) return", "if (s < 0) return", "values", *NO_TOKENS),
    "offsets_shifted": Mutant(
        "limit_of(offsets, work.sequence, lane", "limit_of(offsets, work.sequence + 1, lane", "values", *PACKED
    ),
    "offsets_not_limited": Mutant(
        "offset > long(params.T) ? params.T : uint(offset)", "uint(offset)", "bounds", *PACKED
    ),
    "no_zeros_before": Mutant("if (found.sequence == 0) store_zeros", "if (false) store_zeros", "values", *PACKED),
    "no_zeros_after": Mutant("if (found.sequence + 1 == params.sequences)", "if (false)", "values", *PACKED),
    "outside_is_normed": Mutant("T(exists ? y : 0)", "T(y)", "values", *OUTSIDE),
    # gates and norms
    "norm_of_16_columns": Mutant(
        "simd_sum(squares) / float(params.V)", "simd_sum(squares) / 16", "values", *cut("keys of 128")
    ),
    "norm_weights_of_the_first_head": Mutant(
        "params.norms_groups ? ulong(work.head) * params.V : 0", "0", "values", *groups("keys of 128", True)
    ),
    "norm_weights_of_the_first_group": Mutant(
        "params.norms_groups ? row * length : 0", "0 * row", "values", *groups("tiles of columns", True)
    ),
    "norm_before_the_gate": Mutant(
        "results[i] * (params.gate_first ? gated : 1)", "results[i]", "values", *groups("keys of 64", False)
    ),
    "norm_weights_overrun": Mutant(
        "min(at.lane + n * kSimdgroup, columns - 1)", "at.lane + n * kSimdgroup", "bounds", *cut("any rows")
    ),
    "heads_not_tiled": Mutant("params.tiled ?", "false ?", "values", *channels("many rows")),
    "skip_of_the_first_head": Mutant("tensors.skip, work.head", "tensors.skip, 0", "values", *cut("keys of 64")),
    # short_conv_
    "conv_tap_skipped": Mutant("i < params.W; ++i", "i + 1 < params.W; ++i", "values", *convolution(9, 3, 1)),
    "dilation_ignored": Mutant("t + ulong(i) * params.dilation", "t + ulong(i)", "values", *convolution(7, 2, 3)),
    "conv_kept_from_the_wrong_row": Mutant(
        "before + t - params.R", "before + params.T - params.R", "values", *convolution(9, 3, 1)
    ),
    "conv_gate_forgotten": Mutant("if (!params.has_input_gate)", "if (true)", "values", *convolution(1, 4, 1)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_recurrences_are_detected(name: str, monkeypatch):
    assert_detected(MUTANTS[name], monkeypatch)


UNBROKEN = {(mutant.test.__name__, *map(str, mutant.arguments.values())): mutant for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", UNBROKEN, ids="-".join)
def test_unbroken_recurrences_pass(name: tuple, monkeypatch):
    run_test(UNBROKEN[name], lambda text: text, monkeypatch)
