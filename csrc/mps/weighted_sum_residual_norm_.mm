#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum_residual_norm_");

Tensor weighted_sum_residual_norm_(const Tensor& residual, const Tensor& slots, const Tensor& weights,
                                   const Tensor& norm_weight, double eps) {
  const WeightedSum call = checked_weighted_sum_residual_norm_(residual, slots, weights, norm_weight, eps);
  launch(kernels[slots.scalar_type()], grid_of_rows(call.T, call.H), call.slots, call.weights, call.norm_weight,
         call.residual, call.output, weighted_sum_params(call));
  call.in_place.done();
  return call.output;
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) {
  m.impl("weighted_sum_residual_norm_", &moe_metal::weighted_sum_residual_norm_);
}
