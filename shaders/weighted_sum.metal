// output = sum_k weights * slots + sigmoid(shared_gate) * shared + residual
//
// slots [T, K, H]; weights [T, K]; shared, residual [T, H] and shared_gate [T], or absent; output [T, H].
// Grid: tokens along x, parts of H along y; each thread has four elements.
#include <metal_stdlib>
using namespace metal;

#include "maths.h"
#include "weighted_sum.h"

namespace moe_metal {

template <typename T>
[[kernel]] void weighted_sum(device const T* slots [[buffer(0)]], device const T* weights [[buffer(1)]],
                             device const T* shared [[buffer(2)]], device const T* shared_gate [[buffer(3)]],
                             device const T* residual [[buffer(4)]], device T* output [[buffer(5)]],
                             constant WeightedSumParams& params [[buffer(6)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint i = first_element(group.y, thread_index, simdgroups);
  if (group.x >= params.row.count || i >= params.row.length) return;
  const ulong token = group.x, row = token * params.row.length;
  float4 total = Slots<T>(slots, weights, token, params).sum(i, params.row.aligned);
  if (params.has_shared) {
    const bool gated = params.shared_gate != ParameterType::absent;
    const float scale = gated ? sigmoid(load(shared_gate, token, params.shared_gate)) : 1;
    total += scale * load4(shared + row, i, params.row);
  }
  if (params.has_residual) total += load4(residual + row, i, params.row);
  store4(output + row, i, total, params.row);
}

}  // namespace moe_metal

instantiate_dtypes("weighted_sum", weighted_sum)
