#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("norm_add");

Tensor norm_add(const Tensor& residual, const Tensor& input, const Tensor& weight, const OptionalTensor& scalar,
                double eps) {
  const ResidualNorm call = checked_norm_add(residual, input, weight, scalar, eps);
  launch(kernels[input.scalar_type()], grid_of_rows(call.T, call.H), call.residual, call.input, call.weight,
         call.scalar, call.output, residual_norm_params(call));
  return call.output;
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("norm_add", &moe_metal::norm_add); }
