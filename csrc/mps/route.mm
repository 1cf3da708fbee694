#include "mps/route.h"

#include <torch/library.h>

namespace moe_metal {
namespace {

std::tuple<Tensor, Tensor> route(const Tensor& logits, const OptionalTensor& select_bias,
                                 const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                 std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                 std::string_view group_score, double scaling_factor, double softcap) {
  const Route call =
      checked_route(logits, select_bias, per_expert_scale,
                    {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap});
  launch(route_kernel(call.params.experts, logits.scalar_type()), route_grid(call.T), call.logits, call.select_bias,
         call.per_expert_scale, call.weights, call.ids,
         route_params(call.params, call.T, call.logits, call.select_bias, call.per_expert_scale));
  return {call.weights, call.ids};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("route", &moe_metal::route); }
