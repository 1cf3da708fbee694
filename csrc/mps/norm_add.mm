// The ops norm_add and norm.
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

RowKernels kernels("norm_add");

}  // namespace

void mps::run_norm(const Norm& call) { run_norm_add(call); }

void mps::run_norm_add(const Norm& call) {
  const Grid grid = grid_of_rows(call.T, call.H);
  launch(kernels(call.input.scalar_type(), grid), grid, call.input, call.residual, call.weight, call.scalar,
         call.output, residual_norm_params(call));
}

}  // namespace moe_metal
