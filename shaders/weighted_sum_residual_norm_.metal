// residual += sum_k weights * slots; output = norm(residual) * norm_weight
//
// slots [T, K, H]; weights [T, K]; norm_weight [H]; residual [T, H], read and written in place; output [T, H].
// The norm uses the sum before it is rounded to the residual's type.
// Grid: one threadgroup per token, along x.
#include <metal_stdlib>
using namespace metal;

#include "weighted_sum.h"

namespace moe_metal {

template <typename T>
struct ResidualNormRow {
  using Value = float4;
  Slots<T> slots;
  device const T* norm_weight;
  device T* residual;
  device T* output;
  WeightedSumParams params;

  float4 value(uint i) const thread { return slots.sum(i, params.row.aligned) + load4<T>(residual, i, params.row); }
  float2 squares(float4 v) const thread { return float2(dot(v, v), 0); }
  void write(uint i, float4 v, float2 inv_rms) const thread {
    store4(residual, i, v, params.row);
    store4(output, i, v * inv_rms.x * load4(norm_weight, i, params.row, params.norm_weight), params.row);
  }
};

template <typename T>
[[kernel]] void weighted_sum_residual_norm_(device const T* slots [[buffer(0)]], device const T* weights [[buffer(1)]],
                                            device const T* norm_weight [[buffer(2)]], device T* residual [[buffer(3)]],
                                            device T* output [[buffer(4)]],
                                            constant WeightedSumParams& params [[buffer(5)]],
                                            uint group [[threadgroup_position_in_grid]],
                                            uint thread_index [[thread_index_in_threadgroup]],
                                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  if (group >= params.row.count) return;
  const ulong row = ulong(group) * params.row.length;
  const ResidualNormRow<T> work = {Slots<T>(slots, weights, group, params), norm_weight, residual + row, output + row,
                                   params};
  norm_row(work, thread_index, simdgroups, partial);
}

}  // namespace moe_metal

instantiate_dtypes("weighted_sum_residual_norm_", weighted_sum_residual_norm_)
