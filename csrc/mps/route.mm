// The op route.
#include "mps/route.h"

#include <torch/library.h>

namespace moe_metal {
namespace {

void run(const Route& call) {
  launch(route_kernel(call.params.experts, call.logits.scalar_type()), route_grid(call.T), call.logits,
         call.select_bias, call.per_expert_scale, call.weights, call.ids,
         route_params(call.params, call.T, call.logits, call.select_bias, call.per_expert_scale));
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("route", &moe_metal::route<moe_metal::run>); }
