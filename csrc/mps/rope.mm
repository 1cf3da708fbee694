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

RopeHeadsParams heads_params(const RopeHeads& heads) {
  if (!heads.heads) return {};
  return {.input = strides(heads.input),
          .output = output_strides(heads.output),
          .count = to_uint(heads.heads),
          .D = to_uint(heads.D),
          .R = to_uint(heads.R),
          .norm = heads.norm,
          .norm_weight = parameter_type(heads.norm_weight),
          .scale = heads.scale};
}

}  // namespace

void mps::run_rope(const Rope& call) {
  const int64_t heads = call.q.heads + call.k.heads + call.v.heads + call.q_first.heads,
                items = call.B * call.T * heads;
  const bool rotates = call.q.R > 0;
  const RopeParams params = {
      .q = heads_params(call.q),
      .k = heads_params(call.k),
      .v = heads_params(call.v),
      .q_first = heads_params(call.q_first),
      .cos = rotates ? angle_strides(call.cos) : AttentionStrides(),
      .sin = rotates ? angle_strides(call.sin) : AttentionStrides(),
      .items = to_uint(items),
      .T = to_uint(call.T),
      .interleaved = call.interleaved,
      .pairs_stay = call.pairs_stay,
      .norms_last = call.norms_last,
      .cos_type = parameter_type(call.cos),
      .sin_type = parameter_type(call.sin),
      .eps = call.eps,
  };
  launch(kernels[call.q.input.scalar_type()], {ceil_div(items, kRopeSimdgroups), 1, kThreads}, call.q.input,
         call.k.input, call.v.input, call.q_first.input, call.cos, call.sin, call.q.norm_weight, call.k.norm_weight,
         call.v.norm_weight, call.q.output, call.k.output, or_spare(call.v.output, 0), or_spare(call.q_first.output, 1),
         params);
}

}  // namespace moe_metal
