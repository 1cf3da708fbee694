// The ops norm_add and norm.
#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

RowKernels kernels("norm_add");

void run(const ResidualNorm& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.input.scalar_type(), grid), grid, call.input, call.residual, call.weight, call.scalar,
         call.output, residual_norm_params(call));
}

}  // namespace
}  // namespace moe_metal

// norm is norm_add with fewer arguments.
TORCH_LIBRARY_IMPL(moe_metal, MPS, m) {
  m.impl("norm", &moe_metal::norm<moe_metal::run>);
  m.impl("norm_add", &moe_metal::norm_add<moe_metal::run>);
}
