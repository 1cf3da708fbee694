// The op route.
#include "mps/route.h"
#include "ops.h"

namespace moe_metal {

void mps::run_route(const Route& call) {
  launch(route_kernel(call.params.experts, call.logits.scalar_type()), route_grid(call.T), call.logits,
         call.select_bias, call.per_expert_scale, call.weights, call.ids,
         route_params(call.params, call.T, call.logits, call.select_bias, call.per_expert_scale));
}

}  // namespace moe_metal
