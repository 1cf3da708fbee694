// The op short_conv_: output_gate * activation(convolution(input_gate * x)), a convolution over time of each channel.
//
// x and gates [B, T, C], past [B, (W - 1) dilation, C] and kept [B, R, C] have any strides; weight [C, W], bias [C];
// output [B, T, C]. A thread has a channel of one token, or of one row of `kept`. The inputs of a token are read by the
// W tokens that need them, from the cache. Grid: B times T tokens and R kept rows along x, channels along y.
#include <metal_stdlib>
using namespace metal;

#include "pointwise.h"
#include "rows.h"

namespace moe_metal {

template <typename T>
struct ConvInputs {
  device const T* x;
  device const T* gate;
  device const T* past;

  // Row `row` of past and gated inputs.
  T at(ulong row, constant ShortConvParams& params) const thread {
    const ulong before = ulong(params.W - 1) * params.dilation;
    if (row < before) return params.has_past ? past[row * params.past.row] : T(0);
    const T input = x[(row - before) * params.x.row];
    if (!params.has_input_gate) return input;
    return T(float(input) * float(gate[(row - before) * params.input_gate.row]));
  }
};

template <typename T>
[[kernel]] void short_conv(device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]],
                           device const T* bias [[buffer(2)]], device const T* input_gate [[buffer(3)]],
                           device const T* output_gate [[buffer(4)]], device const T* past [[buffer(5)]],
                           device T* kept [[buffer(6)]], device T* output [[buffer(7)]],
                           constant ShortConvParams& params [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong c = ulong(group.y) * simdgroups * kSimdgroup + thread_index;
  const uint rows = params.T + params.R, t = group.x % rows;
  const ulong b = group.x / rows;
  if (b >= params.B || c >= params.C) return;
  const ConvInputs<T> inputs = {x + b * params.x.sequence + c * params.x.element,
                                input_gate + b * params.input_gate.sequence + c * params.input_gate.element,
                                past + b * params.past.sequence + c * params.past.element};
  if (t >= params.T) {
    const ulong before = ulong(params.W - 1) * params.dilation;
    kept[b * params.kept.sequence + (t - params.T) * params.kept.row + c * params.kept.element] =
        inputs.at(before + t - params.R, params);
    return;
  }
  float sum = 0;
  for (uint i = 0; i < params.W; ++i) {
    const float tap = load(weight, c * params.W + i, params.weight);
    sum = fma(tap, float(inputs.at(t + ulong(i) * params.dilation, params)), sum);
  }
  if (params.bias != ParameterType::absent) sum += load(bias, c, params.bias);
  float y = pointwise(sum, params.activation);
  if (params.has_output_gate) {
    y *= float(
        output_gate[b * params.output_gate.sequence + t * params.output_gate.row + c * params.output_gate.element]);
  }
  output[(b * params.T + t) * params.C + c] = T(y);
}

}  // namespace moe_metal

instantiate_dtypes("short_conv", short_conv)
