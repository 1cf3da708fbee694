// residual += sum_k weights * slots
//
// slots [T, K, H]; weights [T, K]; residual [T, H], read and written in place.
// Grid: tokens along x, parts of H along y; each thread has four elements.
#include <metal_stdlib>
using namespace metal;

#include "weighted_sum.h"

namespace moe_metal {

template <typename T>
[[kernel]] void weighted_sum_residual_(device const T* slots [[buffer(0)]], device const T* weights [[buffer(1)]],
                                       device T* residual [[buffer(2)]],
                                       constant WeightedSumParams& params [[buffer(3)]],
                                       uint2 group [[threadgroup_position_in_grid]],
                                       uint thread_index [[thread_index_in_threadgroup]],
                                       uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint i = first_element(group.y, thread_index, simdgroups);
  if (group.x >= params.row.count || i >= params.row.length) return;
  const ulong token = group.x;
  device T* row = residual + token * params.row.length;
  const float4 total =
      Slots<T>(slots, weights, token, params).sum(i, params.row.aligned) + load4<T>(row, i, params.row);
  store4(row, i, total, params.row);
}

}  // namespace moe_metal

instantiate_dtypes("weighted_sum_residual_", weighted_sum_residual_)
