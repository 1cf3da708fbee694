// output = (residual + norm(input) * weight) * scalar, and the op norm: norm(input) * weight
//
// input [T, H] with any distance between its rows, output [T, H]; residual [T, H] and weight [H], which may be absent
// in norm; scalar [1] or [H], or absent. Grid: one threadgroup per token, along x.
#include <metal_stdlib>
using namespace metal;

#include "rows.h"

namespace moe_metal {

template <typename T>
struct NormAddRow {
  using Value = float4;
  device const T* input;
  device const T* residual;
  device const T* weight;
  device const T* scalar;
  device T* output;
  ResidualNormParams params;

  float4 value(uint i) const thread { return load4(input, i, params.row); }
  float2 squares(float4 v) const thread { return float2(dot(v, v), 0); }
  void write(uint i, float4 v, float2 inv_rms) const thread {
    v *= inv_rms.x;
    if (params.weight != ParameterType::absent) v *= load4(weight, i, params.row, params.weight);
    if (params.has_residual) v += load4(residual, i, params.row);
    store4(output, i, v * load_scalar(scalar, i, params), params.row);
  }
};

template <typename T>
[[kernel]] void norm_add(device const T* input [[buffer(0)]], device const T* residual [[buffer(1)]],
                         device const T* weight [[buffer(2)]], device const T* scalar [[buffer(3)]],
                         device T* output [[buffer(4)]], constant ResidualNormParams& params [[buffer(5)]],
                         uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  if (group >= params.row.count) return;
  const ulong row = ulong(group) * params.row.length;
  const NormAddRow<T> work = {
      input + ulong(group) * params.input_row, residual + row, weight, scalar, output + row, params};
  norm_row(work, thread_index, simdgroups, partial);
}

}  // namespace moe_metal

instantiate_dtypes("norm_add", norm_add)
