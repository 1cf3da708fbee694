#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum", kBlockThreads);

Tensor weighted_sum(const Tensor& slots, const Tensor& weights, const OptionalTensor& shared,
                    const OptionalTensor& shared_gate, const OptionalTensor& residual) {
  const WeightedSum call = checked_weighted_sum(slots, weights, shared, shared_gate, residual);
  launch(kernels[slots.scalar_type()], grid_of_blocks(call.T, call.H), call.slots, call.weights, call.shared,
         call.shared_gate, call.residual, call.output, weighted_sum_params(call));
  return call.output;
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("weighted_sum", &moe_metal::weighted_sum); }
