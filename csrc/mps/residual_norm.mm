// The op residual_norm.
#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

RowKernels kernels("residual_norm");

void run(const ResidualNorm& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.input.scalar_type(), grid), grid, call.residual, call.input, call.weight, call.scalar,
         call.output, call.sum, residual_norm_params(call));
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("residual_norm", &moe_metal::residual_norm<moe_metal::run>); }
