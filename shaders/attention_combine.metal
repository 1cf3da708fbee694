// Combines the results that attention.metal wrote for each part of the keys. Its head describes the tensors.
//
// Grid: rows of the output along x.
#include <metal_stdlib>
using namespace metal;

#include "attention.h"

namespace moe_metal {

// The simdgroups divide the parts. A lane has four columns, or several times four, and the stats of one part. The loads
// of kPartsAtOnce parts and their stats are issued before the first one is waited for.
template <typename T>
[[kernel]] void attention_combine(device const float* parts [[buffer(0)]], device const T* sinks [[buffer(1)]],
                                  device T* output [[buffer(2)]], constant AttentionParams& params [[buffer(3)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]],
                                  uint threads [[threads_per_threadgroup]]) {
  threadgroup float4 partial[kCombineThreads];
  threadgroup float2 partial_stats[kCombineSimdgroups];
  const uint heads = params.A / params.J, head = group % params.A, query = group / params.A % params.T;
  const ulong sequence = group / params.A / params.T;
  if (sequence >= params.B) return;
  const ulong row = (sequence * params.J + head / heads) * params.rows + ulong(query) * heads + head % heads;
  device const float2* stats = reinterpret_cast<device const float2*>(parts) + row * params.parts;
  const uint columns = part_columns(params);
  device const float* sums = parts + params.sums_offset + row * params.parts * columns;
  const uint lane = thread_index % kSimdgroup, simdgroup = thread_index / kSimdgroup, simdgroups = threads / kSimdgroup;
  RowShape shape;
  shape.length = params.V;
  shape.aligned = params.V % kVectorWidth == 0;
  for (uint first = 0; first < params.V; first += kVectorWidth * kSimdgroup) {
    const uint column = first + kVectorWidth * lane;
    const uint inside = min(column, columns - kVectorWidth);
    float highest = -INFINITY, total = 0;
    float4 sum = 0;
    for (uint part = simdgroup; part < params.parts; part += simdgroups * kPartsAtOnce) {
      const uint last = min((params.parts - 1 - part) / simdgroups, kPartsAtOnce - 1);
      const float2 mine = stats[part + simdgroups * min(lane, last)];
      float4 loaded[kPartsAtOnce];
#pragma unroll
      for (uint n = 0; n < kPartsAtOnce; ++n) {
        loaded[n] = load4_aligned(sums + ulong(part + simdgroups * min(n, last)) * columns + inside);
      }
      const float before = highest, most = simd_max(mine.x);
      highest = most > highest ? most : highest;
      const float offset = offset_of(highest).x, scale = exp(before - offset);
      const float factor = lane <= last ? exp(mine.x - offset) : 0;
      total = total * scale + mine.y * factor;
      sum *= scale;
#pragma unroll
      for (uint n = 0; n < kPartsAtOnce; ++n) {
        const float its_factor = simd_shuffle(factor, ushort(n));
        if (n <= last) sum += loaded[n] * its_factor;
      }
    }
    total = simd_sum(total);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // until the previous columns have been read
    partial[thread_index] = sum;
    if (lane == 0) partial_stats[simdgroup] = float2(highest, total);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup != 0) continue;
    const float2 other = partial_stats[min(lane, simdgroups - 1)];
    highest = simd_max(other.x);
    const float factor = lane < simdgroups ? exp(other.x - offset_of(highest).x) : 0;
    total = simd_sum(other.y * factor);
    sum = 0;
    for (uint s = 0; s < simdgroups; ++s) sum += partial[s * kSimdgroup + lane] * simd_shuffle(factor, ushort(s));
    if (column < params.V) {
      store4(output + ulong(group) * params.V, column, sum * sums_factor(highest, total, head, sinks, params), shape);
    }
  }
}

}  // namespace moe_metal

instantiate_dtypes("attention_combine", attention_combine)
