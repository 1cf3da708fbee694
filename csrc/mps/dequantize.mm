// The op dequantize.
#include <torch/library.h>

#include "mps/weights.h"

namespace moe_metal {
namespace {

constexpr int kThreads = 256;
FormatKernels kernels("dequantize", "dequantize", kThreads);

// The kernel addresses dense data in bytes, since their dtype may differ from the output's.
WeightParams byte_params(const Weight& weight) {
  WeightParams params = weight_params(weight, weight.rows);
  if (!weight.format->is_dense()) return params;
  for (int64_t* stride : {&params.expert, &params.row, &params.column}) *stride *= weight.data.element_size();
  return params;
}

void run(const Dequantize& call) {
  const Weight& weight = call.weight;
  const int64_t chunks = ceil_div(weight.columns, kNarrowColumns), all = call.output.numel() / weight.columns * chunks;
  const DequantizeParams params = {.all_chunks = static_cast<uint64_t>(all),
                                   .rows = to_uint(weight.rows),
                                   .columns = to_uint(weight.columns),
                                   .chunks = to_uint(chunks),
                                   .dense_type = number_type(weight.data),
                                   .weight = byte_params(weight)};
  launch(kernels(call.output.scalar_type(), weight.format), Grid{ceil_div(all, kThreads), 1, kThreads}, weight.data,
         weight.scale, weight.offset, call.output, params);
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("dequantize", &moe_metal::dequantize<moe_metal::run>); }
