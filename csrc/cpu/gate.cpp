// The logits are float from the products on, whatever the dtypes, and come in one of three ways, all of which add in an
// order that neither the threads nor the other tokens change:
//   dots     few tokens, any dtype: experts shared out among threads
//   tiles    some tokens in bfloat16, on processors with AMX
//   blocks   many tokens, on AVX-512: oneDNN's brgemm, in float, or with AMX in bfloat16
#include <torch/library.h>

#include "contract.h"
#include "gate_blocks.h"
#include "gate_dots.h"
#include "gate_tiles.h"

namespace moe_metal {
namespace {

// Where the ways meet, with E = 128 and H = 2048 on 2 cores: tiles for dots at T = 8 take 14 us for 38, blocks for
// tiles at 1024 391 for 467, and float blocks for dots at 64 239 for 305.
void gate_by_the_best_way(const Gate& call) {
#ifdef MOE_METAL_AMX  // AVX-512 on Linux
  const bool bfloat16 = call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16;
  if (call.T > 4 && bfloat16 && tiles_available()) {
    const bool pairs = call.H % 2 == 0 && !call.norm_weight.defined();
    return pairs && call.T > 256 ? gate_by_blocks<at::BFloat16>(call) : gate_by_tiles(call);
  }
  if (call.T > 32) return gate_by_blocks<float>(call);
#endif
  gate_by_dots(call);
}

std::tuple<Tensor, Tensor> gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                                const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                                const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                std::string_view group_score, double scaling_factor, double softcap, double eps) {
  Gate call =
      checked_gate(hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale,
                   {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap}, eps);
  if (call.T == 0) return {call.weights, call.ids};
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  gate_by_the_best_way(call);
  return {call.weights, call.ids};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("gate", &moe_metal::gate); }
