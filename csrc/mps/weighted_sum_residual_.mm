#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum_residual_", kBlockThreads);

void weighted_sum_residual_(const Tensor& residual, const Tensor& slots, const Tensor& weights) {
  const WeightedSum call = checked_weighted_sum_residual_(residual, slots, weights);
  launch(kernels[slots.scalar_type()], grid_of_blocks(call.T, call.H), call.slots, call.weights, call.residual,
         weighted_sum_params(call));
  call.in_place.done();
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("weighted_sum_residual_", &moe_metal::weighted_sum_residual_); }
