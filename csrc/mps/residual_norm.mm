// The op residual_norm.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

RowKernels kernels("residual_norm");

}  // namespace

void mps::run_residual_norm(const ResidualNorm& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.input.scalar_type(), grid), grid, call.residual, call.input, call.weight, call.scalar,
         call.output, call.sum, residual_norm_params(call));
}

}  // namespace moe_metal
