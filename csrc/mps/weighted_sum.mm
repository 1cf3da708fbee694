// The op weighted_sum.
#include <torch/library.h>

#include "mps/rows.h"

namespace moe_metal {
namespace {

Kernels kernels("weighted_sum", kElementThreads);

void run(const WeightedSum& call) {
  launch(kernels[call.slots.scalar_type()], grid_of_elements(call.T, call.H), call.slots, call.weights, call.shared,
         call.shared_gate, call.residual, call.output, weighted_sum_params(call));
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("weighted_sum", &moe_metal::weighted_sum<moe_metal::run>); }
