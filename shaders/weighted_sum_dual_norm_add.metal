// output = norm(residual) * residual_norm_weight + norm(sum_k weights * slots) * moe_norm_weight
//
// slots [T, K, H]; weights [T, K]; residual, output [T, H]; residual_norm_weight, moe_norm_weight [H].
// Grid: one threadgroup per token, along x. Both norms share one pass over the row and one reduction.
#include <metal_stdlib>
using namespace metal;

#include "weighted_sum.h"

namespace moe_metal {

struct Both {
  float4 residual, moe;
};

template <typename T>
struct DualNormAddRow {
  using Value = Both;
  Slots<T> slots;
  device const T* residual;
  device const T* residual_norm_weight;
  device const T* moe_norm_weight;
  device T* output;
  WeightedSumParams params;

  Both value(uint i) const thread { return {load4(residual, i, params.row), slots.sum(i, params.row.aligned)}; }
  float2 squares(Both v) const thread { return float2(dot(v.residual, v.residual), dot(v.moe, v.moe)); }
  void write(uint i, Both v, float2 inv_rms) const thread {
    const float4 first =
        v.residual * inv_rms.x * load4(residual_norm_weight, i, params.row, params.residual_norm_weight);
    const float4 second = v.moe * inv_rms.y * load4(moe_norm_weight, i, params.row, params.norm_weight);
    store4(output, i, first + second, params.row);
  }
};

template <typename T>
[[kernel]] void weighted_sum_dual_norm_add(
    device const T* slots [[buffer(0)]], device const T* weights [[buffer(1)]], device const T* residual [[buffer(2)]],
    device const T* residual_norm_weight [[buffer(3)]], device const T* moe_norm_weight [[buffer(4)]],
    device T* output [[buffer(5)]], constant WeightedSumParams& params [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  if (group >= params.row.count) return;
  const ulong row = ulong(group) * params.row.length;
  const DualNormAddRow<T> work = {Slots<T>(slots, weights, group, params),
                                  residual + row,
                                  residual_norm_weight,
                                  moe_norm_weight,
                                  output + row,
                                  params};
  norm_row(work, thread_index, simdgroups, partial);
}

}  // namespace moe_metal

instantiate_dtypes("weighted_sum_dual_norm_add", weighted_sum_dual_norm_add)
