// sum = residual + input; output = norm(sum) * weight * scalar
//
// residual, input, output, sum [T, H]; weight [H]; scalar [1] or [H], or absent.
// The norm uses the sum before it is rounded.
// Grid: one threadgroup per token, along x.
#include <metal_stdlib>
using namespace metal;

#include "rows.h"

namespace moe_metal {

template <typename T>
struct ResidualNormRow {
  using Value = float4;
  device const T* residual;
  device const T* input;
  device const T* weight;
  device const T* scalar;
  device T* output;
  device T* sum;
  ResidualNormParams params;

  float4 value(uint i) const thread { return load4(residual, i, params.row) + load4(input, i, params.row); }
  float2 squares(float4 v) const thread { return float2(dot(v, v), 0); }
  void write(uint i, float4 v, float2 inv_rms) const thread {
    store4(sum, i, v, params.row);
    v = v * inv_rms.x * load4(weight, i, params.row, params.weight);
    store4(output, i, v * load_scalar(scalar, i, params), params.row);
  }
};

template <typename T>
[[kernel]] void residual_norm(device const T* residual [[buffer(0)]], device const T* input [[buffer(1)]],
                              device const T* weight [[buffer(2)]], device const T* scalar [[buffer(3)]],
                              device T* output [[buffer(4)]], device T* sum [[buffer(5)]],
                              constant ResidualNormParams& params [[buffer(6)]],
                              uint group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  if (group >= params.row.count) return;
  const ulong row = ulong(group) * params.row.length;
  const ResidualNormRow<T> work = {residual + row, input + row, weight, scalar, output + row, sum + row, params};
  norm_row(work, thread_index, simdgroups, partial);
}

}  // namespace moe_metal

instantiate_dtypes("residual_norm", residual_norm)
