// The op weighted_sum_residual_norm_.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

RowKernels kernels("weighted_sum_residual_norm_");

}  // namespace

void mps::run_weighted_sum_residual_norm_(const WeightedSumResidualNorm& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.slots.scalar_type(), grid), grid, call.slots, call.weights, call.norm_weight, call.residual,
         call.output, weighted_sum_params(call));
}

}  // namespace moe_metal
