// The op weighted_sum.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum", kElementThreads);

}  // namespace

void mps::run_weighted_sum(const WeightedSum& call) {
  launch(kernels[call.slots.scalar_type()], grid_of_elements(call.T, call.H), call.slots, call.weights, call.shared,
         call.shared_gate, call.residual, call.output, weighted_sum_params(call));
}

}  // namespace moe_metal
