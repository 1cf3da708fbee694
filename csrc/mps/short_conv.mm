// The op short_conv_.
#include "mps/recurrent.h"
#include "ops.h"

namespace moe_metal {
namespace {

Kernels kernels("short_conv", kConvThreads);

}  // namespace

void mps::run_short_conv_(const ShortConv& call) {
  const int64_t rows = call.B * (call.T + call.R);
  to_uint(rows);
  const ShortConvParams params = {
      .x = row_strides(call.x),
      .input_gate = row_strides(call.input_gate),
      .output_gate = row_strides(call.output_gate),
      .past = row_strides(call.past),
      .kept = row_strides(call.kept),
      .B = to_uint(call.B),
      .T = to_uint(call.T),
      .C = to_uint(call.C),
      .W = to_uint(call.W),
      .R = to_uint(call.R),
      .dilation = to_uint(call.dilation),
      .has_input_gate = call.input_gate.defined(),
      .has_output_gate = call.output_gate.defined(),
      .has_past = call.past.defined(),
      .weight = parameter_type(call.weight),
      .bias = parameter_type(call.bias),
      .activation = call.activation,
  };
  const int64_t threads = std::min<int64_t>(ceil_div(call.C, kSimdgroup) * kSimdgroup, kConvThreads);
  const Grid grid = {rows, ceil_div(call.C, threads), static_cast<int>(threads)};
  launch(kernels[call.x.scalar_type()], grid, or_spare(call.x, 0), call.weight, call.bias, read(call.input_gate),
         read(call.output_gate), read(call.past), or_spare(call.kept, 1), or_spare(call.output, 2), params);
}

}  // namespace moe_metal
