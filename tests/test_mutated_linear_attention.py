"""The CPU's linear attention, broken one line at a time: a test of a few cases must fail, as in
test_mutated_cpu_readers.py."""

import shutil
from pathlib import Path

import pytest

from test_mutated_cpu_readers import ROOT, Fault, detected, needs

CALLS = "test_linear_attention.py::"
REFERENCE = "test_ops.py::test_equals_the_reference"
OP, RECURRENCE, GATES = "linear_attention.cpp", "linear_attention/recurrence.h", "linear_attention/gates.h"
CONVOLUTION, SHORT = "linear_attention/convolution.h", "short_conv.cpp"
#: The cases of REFERENCE that must be enough.
CASES = "(linear_attention_ or short_conv_) and (sample or log or offsets or x5 or nemotron)"

FAULTS = [
    Fault("tap_skipped", CONVOLUTION, "for (int64_t i = 0; i < W; ++i) {", "for (int64_t i = 1; i < W; ++i) {",
          REFERENCE),
    Fault("dilation_ignored", CONVOLUTION, "rows + (t + i * dilation) * channels", "rows + (t + i) * channels",
          REFERENCE),
    Fault("bias_of_the_first_channels", CONVOLUTION, "elements<float>(bias) + first", "elements<float>(bias)",
          REFERENCE),
    Fault("product_not_rounded", SHORT, "static_cast<float>(Scalar(to[i] * factors[i]))", "to[i] * factors[i]",
          f"{CALLS}test_a_short_convolution_may_be_cut"),
    Fault("decay_after_the_update", RECURRENCE, "at::vec::fmadd(key, u[n], factor * load(row + n * kLanes, count))",
          "factor * at::vec::fmadd(key, u[n], load(row + n * kLanes, count))", REFERENCE),
    Fault("decay_of_the_first_channel", GATES, "store(factors + d, Decay(call.options, raw, own_rate).factor, count)",
          "store(factors + d, Decay(call.options, Vec(factors[0]), own_rate).factor, count)", REFERENCE),
    Fault("beta_forgotten", GATES, "if (call.options.rule == Rule::delta) betas", "if (false) betas", REFERENCE),
    Fault("query_does_not_see_its_key", RECURRENCE, "const float qk = dot(token.q, token.k, token.D)",
          "const float qk = 0", REFERENCE),
    Fault("values_of_rows_not_seen", RECURRENCE, "delta ? token.v[v] - sum(seen) : token.v[v]", "token.v[v]",
          REFERENCE),
    Fault("replay_one_row_short", OP, "r < call_.replay", "r + 1 < call_.replay", REFERENCE),
    Fault("state_after_the_log_is_kept", OP, "one_token(logged, ", "one_token(state, ", REFERENCE),
    Fault("log_of_the_first_rows", OP, "log_row(item, call_.replay + t", "log_row(item, t", REFERENCE),
    Fault("kept_from_the_row_before", OP, "token = sequence.length() - call.R + r;",
          "token = sequence.length() - call.R + (r > 0 ? r - 1 : r);", REFERENCE),
    Fault("past_of_the_first_sequence", OP, "sequence.index * past.stride(0) + (call_.W",
          "0 * past.stride(0) + (call_.W", REFERENCE),
    Fault("mask_ignored", OP, "if (!mask.defined()) return;", "if (true) return;", REFERENCE),
    Fault("offsets_shifted", OP, "std::clamp<int64_t>(offset, 0, call.T)", "std::clamp<int64_t>(offset + 1, 0, call.T)",
          REFERENCE),
    Fault("tokens_outside_not_cleared", OP, "  clear_outside(call, sequences);\n", "", REFERENCE),
    Fault("last_chunk_of_few_tokens", OP, "unlogged / kChunkTokens * kChunkTokens - t",
          "(unlogged + kChunkTokens - 1) / kChunkTokens * kChunkTokens - t", f"{CALLS}test_a_prompt_may_be_cut"),
    Fault("tokens_of_a_chunk_not_seen", RECURRENCE, "L[i][j] = -sum(by_k[j])", "L[i][j] = 0 * sum(by_k[j])",
          f"{CALLS}test_a_prompt_may_be_cut"),
    Fault("norm_over_whole_vectors", OP, "inv_rms(token.o, V, options.eps)", "inv_rms(token.o, value_, options.eps)",
          REFERENCE),
    Fault("heads_in_their_own_order", OP, "options.tiled ? g * call_.J + item.j : h", "h", REFERENCE),
    Fault("state_shared_by_heads", OP, "head(item, g) * state_.stride(1)", "head(item, item.first) * state_.stride(1)",
          REFERENCE),
]  # fmt: skip


def reached_by(fault: Fault) -> set[str]:
    both = {"linear_attention", "short_conv"}
    return both if fault.file == CONVOLUTION else {"short_conv"} if fault.file == SHORT else {"linear_attention"}


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=needs(fault.isa)) for fault in FAULTS])
def test_broken_linear_attention_is_detected(fault: Fault, tmp_path: Path):
    sources = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    detected(fault, sources, reached_by(fault), tmp_path, *(["-k", CASES] if fault.test == REFERENCE else []))
