// The op gate: one dispatch, or one for the logits and one of route.metal.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "mps/route.h"
#include "mps/rows.h"
#include "mps/tuning.h"

namespace moe_metal {
namespace {

Kernels gate_kernels("gate", "gate", 1024, "gate");
Kernels one_token_kernels("gate", "gate_logits_1", kGateSimdgroups* kSimdgroup, "logits_1");
Kernels four_token_kernels("gate", "gate_logits_4", kGateSimdgroups* kSimdgroup, "logits_4");
Kernels tile_kernels("gate", "gate_tile", kGateTileThreads, "tile");

// With one dispatch, a single threadgroup, so one GPU core, reads the whole router for each token. Up to 128 KB that
// takes about as long as a second dispatch: an estimate from published figures, not measured.
bool fits_one_dispatch(const Gate& call) {
  const int64_t bytes = call.router_weight.numel() * call.router_weight.element_size();
  return call.T <= 16 && call.params.experts <= static_cast<int>(kGateMaxExperts) && bytes <= 128 * 1024;
}

int simdgroups_for_router(int64_t experts) {
  return static_cast<int>(experts < kMaxSimdgroups ? kMaxSimdgroups / experts * experts : kMaxSimdgroups);
}

struct LogitsKernel {
  Kernels& kernels;
  int64_t tokens, experts;  // of one threadgroup
  int threads;
};
LogitsKernel logits_kernel(int64_t tokens, int64_t experts) {
  const int threads = kGateSimdgroups * kSimdgroup;
  const int64_t tiles = ceil_div(tokens, kGateTileTokens) * ceil_div(experts, kGateTileExperts);
  if (tokens == 1) return {one_token_kernels, 1, 2, threads};
  if (tiles < tuning().gate_min_tiles) return {four_token_kernels, 4, 4, threads};
  return {tile_kernels, kGateTileTokens, kGateTileExperts, kGateTileThreads};
}

GateParams gate_params(const Gate& call, const Tensor& logits) {
  return {
      .route = route_params(call.params, call.T, logits, call.select_bias, call.per_expert_scale),
      .row = row_shape(call.T, call.H, {&call.hidden, &call.router_weight, &call.norm_weight}),
      .norm_weight = parameter_type(call.norm_weight),
      .router_bias = parameter_type(call.router_bias),
      .eps = call.eps,
  };
}

void run(const Gate& call) {
  const auto dtype = call.hidden.scalar_type(), router_dtype = call.router_weight.scalar_type();
  const int64_t E = call.params.experts;
  if (fits_one_dispatch(call)) {
    launch(gate_kernels(dtype, router_dtype), Grid{call.T, 1, simdgroups_for_router(E) * kSimdgroup}, call.hidden,
           call.router_weight, call.norm_weight, call.router_bias, call.select_bias, call.per_expert_scale,
           call.weights, call.ids, gate_params(call, Tensor()));
    return;
  }
  const Tensor logits = at::empty({call.T, E}, call.hidden.options().dtype(at::kFloat));
  const LogitsKernel first = logits_kernel(call.T, E);
  const GateParams params = gate_params(call, logits);
  launch({Dispatch(first.kernels(dtype, router_dtype),
                   Grid{ceil_div(call.T, first.tokens), ceil_div(E, first.experts), first.threads}, call.hidden,
                   call.router_weight, call.norm_weight, call.router_bias, logits, params),
          Dispatch(route_kernel(E, dtype), route_grid(call.T), logits, call.select_bias, call.per_expert_scale,
                   call.weights, call.ids, params.route)});
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("gate", &moe_metal::gate<moe_metal::run>); }
