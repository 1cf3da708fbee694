// The op weighted_sum_residual_.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum_residual_", kElementThreads);

}  // namespace

void mps::run_weighted_sum_residual_(const WeightedSumResidual& call) {
  launch(kernels[call.slots.scalar_type()], grid_of_elements(call.T, call.H), call.slots, call.weights, call.residual,
         weighted_sum_params(call));
}

}  // namespace moe_metal
