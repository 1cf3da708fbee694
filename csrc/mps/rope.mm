// The op rope.
#include <torch/library.h>

#include "contract.h"
#include "mps/launch.h"

namespace moe_metal {
namespace {

constexpr int kThreads = kSimdgroup * kRopeSimdgroups;

Kernels kernels("rope", kThreads);

AttentionStrides strides(const Tensor& heads) {
  const auto of = [&](int d) { return static_cast<uint64_t>(heads.stride(d)); };
  return {.sequence = of(0), .head = of(2), .row = of(1), .element = of(3)};
}

AttentionStrides angle_strides(const Tensor& angles) {
  const auto of = [&](int d) { return static_cast<uint64_t>(angles.stride(d)); };
  return {.sequence = of(0), .head = 0, .row = of(1), .element = of(2)};
}

void run(const Rope& call) {
  const int64_t items = call.B * call.T * (call.q.heads + call.k.heads);
  const RopeParams params = {
      .q = strides(call.q.input),
      .k = strides(call.k.input),
      .cos = angle_strides(call.cos),
      .sin = angle_strides(call.sin),
      .items = to_uint(items),
      .T = to_uint(call.T),
      .A = to_uint(call.q.heads),
      .J = to_uint(call.k.heads),
      .D = to_uint(call.D),
      .R = to_uint(call.R),
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
         call.k.input, call.cos, call.sin, call.q.norm_weight, call.k.norm_weight, call.q.output, call.k.output,
         params);
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("rope", &moe_metal::rope<moe_metal::run>); }
