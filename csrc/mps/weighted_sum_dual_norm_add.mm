// The op weighted_sum_dual_norm_add.
#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

RowKernels kernels("weighted_sum_dual_norm_add");

void run(const WeightedSum& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.slots.scalar_type(), grid), grid, call.slots, call.weights, call.residual,
         call.residual_norm_weight, call.norm_weight, call.output, weighted_sum_params(call));
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) {
  m.impl("weighted_sum_dual_norm_add", &moe_metal::weighted_sum_dual_norm_add<moe_metal::run>);
}
