// Registers the CPU kernels. All registrations are in one file because PyTorch's templates take seconds to compile,
// and most of that time is per file.
#include "cpu/ops.h"

#include <torch/library.h>

namespace moe_metal {

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) {
  m.impl("gate", &gate<run_gate>);
  m.impl("route", &route<run_route>);
  m.impl("glu", &glu<run_glu>);
  m.impl("experts", &experts<run_experts>);
  m.impl("linear", &linear<run_linear>);
  m.impl("dequantize", &dequantize<run_dequantize>);
  m.impl("weighted_sum", &weighted_sum<run_weighted_sum>);
  m.impl("weighted_sum_residual_", &weighted_sum_residual_<run_weighted_sum_residual_>);
  m.impl("weighted_sum_residual_norm_", &weighted_sum_residual_norm_<run_weighted_sum_residual_norm_>);
  m.impl("weighted_sum_norm_add", &weighted_sum_norm_add<run_weighted_sum_norm_add>);
  m.impl("weighted_sum_dual_norm_add", &weighted_sum_dual_norm_add<run_weighted_sum_dual_norm_add>);
  m.impl("norm", &norm<run_norm_add>);
  m.impl("norm_add", &norm_add<run_norm_add>);
  m.impl("residual_norm", &residual_norm<run_residual_norm>);
  m.impl("rope", &rope<run_rope>);
  m.impl("attention", &attention<run_attention>);
}

}  // namespace moe_metal
