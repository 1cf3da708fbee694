#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("residual_norm");

std::tuple<Tensor, Tensor> residual_norm(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& scalar, double eps) {
  const ResidualNorm call = checked_residual_norm(residual, input, weight, scalar, eps);
  launch(kernels[input.scalar_type()], grid_of_rows(call.T, call.H), call.residual, call.input, call.weight,
         call.scalar, call.output, call.sum, residual_norm_params(call));
  return {call.output, call.sum};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("residual_norm", &moe_metal::residual_norm); }
