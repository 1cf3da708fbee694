// The op weighted_sum_norm_add.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

RowKernels kernels("weighted_sum_norm_add");

}  // namespace

void mps::run_weighted_sum_norm_add(const WeightedSum& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.slots.scalar_type(), grid), grid, call.slots, call.weights, call.residual, call.norm_weight,
         call.output, weighted_sum_params(call));
}

}  // namespace moe_metal
