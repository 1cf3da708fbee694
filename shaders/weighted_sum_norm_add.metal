// output = residual + norm(sum_k weights * slots) * norm_weight
//
// slots [T, K, H]; weights [T, K]; residual, output [T, H]; norm_weight [H].
// Grid: one threadgroup per token, along x.
#include <metal_stdlib>
using namespace metal;

#include "weighted_sum.h"

namespace moe_metal {

template <typename T>
struct NormAddRow {
  using Value = float4;
  Slots<T> slots;
  device const T* residual;
  device const T* norm_weight;
  device T* output;
  WeightedSumParams params;

  float4 value(uint i) const thread { return slots.sum(i, params.row.aligned); }
  float2 squares(float4 v) const thread { return float2(dot(v, v), 0); }
  void write(uint i, float4 v, float2 inv_rms) const thread {
    v = load4(residual, i, params.row) + v * inv_rms.x * load4(norm_weight, i, params.row, params.norm_weight);
    store4(output, i, v, params.row);
  }
};

template <typename T>
[[kernel]] void weighted_sum_norm_add(device const T* slots [[buffer(0)]], device const T* weights [[buffer(1)]],
                                      device const T* residual [[buffer(2)]], device const T* norm_weight [[buffer(3)]],
                                      device T* output [[buffer(4)]], constant WeightedSumParams& params [[buffer(5)]],
                                      uint group [[threadgroup_position_in_grid]],
                                      uint thread_index [[thread_index_in_threadgroup]],
                                      uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  if (group >= params.row.count) return;
  const ulong row = ulong(group) * params.row.length;
  const NormAddRow<T> work = {Slots<T>(slots, weights, group, params), residual + row, norm_weight, output + row,
                              params};
  norm_row(work, thread_index, simdgroups, partial);
}

}  // namespace moe_metal

instantiate_dtypes("weighted_sum_norm_add", weighted_sum_norm_add)
