// The op rope.
#include "mps/recurrent.h"
#include "ops.h"

namespace moe_metal {
namespace {

constexpr int kThreads = kSimdgroup * kRopeSimdgroups;

Kernels kernels("rope", kThreads);

AttentionStrides strides(const Tensor& heads) {
  const auto of = [&](int d) { return static_cast<uint64_t>(heads.stride(d)); };
  return {.sequence = of(0), .head = of(2), .row = of(1), .element = of(3)};
}

// Of an output [B, heads, T, D].
AttentionStrides output_strides(const Tensor& output) {
  const auto of = [&](int d) { return static_cast<uint64_t>(output.stride(d)); };
  return {.sequence = of(0), .head = of(1), .row = of(2), .element = 1};
}

AttentionStrides angle_strides(const Tensor& angles) {
  const auto of = [&](int d) { return static_cast<uint64_t>(angles.stride(d)); };
  return {.sequence = of(0), .head = 0, .row = of(1), .element = of(2)};
}

}  // namespace

void mps::run_rope(const Rope& call) {
  const bool with_values = call.v.defined();
  const int64_t heads = call.q.heads + call.k.heads * (with_values ? 2 : 1), items = call.B * call.T * heads;
  const RopeParams params = {
      .q = strides(call.q.input),
      .k = strides(call.k.input),
      .v = with_values ? strides(call.v) : AttentionStrides(),
      .cos = angle_strides(call.cos),
      .sin = angle_strides(call.sin),
      .q_output = output_strides(call.q.output),
      .k_output = output_strides(call.k.output),
      .v_output = with_values ? output_strides(call.v_output) : AttentionStrides(),
      .items = to_uint(items),
      .T = to_uint(call.T),
      .A = to_uint(call.q.heads),
      .J = to_uint(call.k.heads),
      .D = to_uint(call.D),
      .R = to_uint(call.R),
      .V = with_values ? to_uint(call.v.size(3)) : 0,
      .interleaved = call.interleaved,
      .q_norms_all = call.q.norms_all(),
      .k_norms_all = call.k.norms_all(),
      .cos_type = parameter_type(call.cos),
      .sin_type = parameter_type(call.sin),
      .q_norm_weight = parameter_type(call.q.norm_weight),
      .k_norm_weight = parameter_type(call.k.norm_weight),
      .eps = call.eps,
  };
  launch(kernels[call.q.input.scalar_type()], {ceil_div(items, kRopeSimdgroups), 1, kThreads}, call.q.input,
         call.k.input, call.v, call.cos, call.sin, call.q.norm_weight, call.k.norm_weight, call.q.output, call.k.output,
         or_spare(call.v_output, 0), params);
}

}  // namespace moe_metal
