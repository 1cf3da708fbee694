// The dispatches of the op experts for many slots that read no weights, so they are the same for every format. The
// first is always `sort`, which sorts the slots by expert. In tiles (experts_prefill.metal), the last is `combine`.
//
// On the matrix units there are six dispatches. Two are products of tensor_ops.metal:
//
//   gather          rows[i] = x[token of order[i]], index_of[order[i]] = i
//   products        both[i] = gate_up[expert] * rows[i]
//   activate        inner[i] = act(both[i] + gate_up_bias[expert])
//   products        results[i] = down[expert] * inner[i]
//   combine_sorted  output[token] = sum_k weights[k] * (results[index_of[k]] + down_bias[expert])
//                                   + sigmoid(shared_gate) * shared + residual
//
// order and index_of are int [T * K], ends is int [E]; rows [T * K, H], both [T * K, 2I], inner [T * K, I] and results
// [T * K, H] have the activations' dtype, so there are three more roundings than in tiles. Slots with an id outside
// [0, E) belong to no expert; all rows from the last end on are undefined and not read.
#include <metal_stdlib>
using namespace metal;

#include "experts.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ sort

// The list reserves one extra tile for each expert, so that every expert can compute the index of its tiles from its
// first slot alone. Unused entries of the list have no slots.
inline void list_tiles(device int4* tiles, uint expert, uint begin, uint count, uint thread_index, uint threads,
                       constant ExpertsParams& params) {
  const uint rows = params.tile_rows, first = begin / rows + expert;
  const uint last = expert == params.E - 1 ? params.tiles : (begin + count) / rows + expert + 1;
  for (uint i = first + thread_index; i < last; i += threads) {
    const uint done = (i - first) * rows;
    tiles[i] = int4(expert, begin + done, done < count ? min(rows, count - done) : 0, 0);
  }
}

#if in_part(sort)
// Grid: one threadgroup per expert. Each reads all ids and counts those of lower experts to find where its own begin.
// That takes E times the reads of a radix sort, from the cache, but only one dispatch, no atomics, and no order between
// threadgroups. The list of tiles is followed by the end of each expert's slots in `order`, int [E].
[[host_name("experts_sort")]] [[kernel]] void experts_sort(
    device const int* ids [[buffer(0)]], device int* order [[buffer(1)]], device int4* tiles [[buffer(2)]],
    constant ExpertsParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup uint lowers[kMaxSimdgroups], owns[kMaxSimdgroups];
  if (group >= params.E) return;
  const int expert = group;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, slots = params.T * params.K;
  // Each simdgroup has a contiguous range of slots, 32 at a time, which keeps the sort stable.
  const uint steps = (slots + 32 * simdgroups - 1) / (32 * simdgroups), first = simdgroup * steps * 32;
  uint lower = 0, own = 0;
  for (uint i = 0; i < steps; ++i) {
    const uint slot = first + i * 32 + lane;
    const int id = slot < slots ? expert_of(ids, slot, params) : -1;
    lower += id >= 0 && id < expert ? 1 : 0;
    own += id == expert ? 1 : 0;
  }
  lower = simd_sum(lower);
  own = simd_sum(own);
  if (lane == 0) {
    lowers[simdgroup] = lower;
    owns[simdgroup] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint begin = simd_sum(lane < simdgroups ? lowers[lane] : 0);
  const uint before = simd_sum(lane < simdgroup ? owns[lane] : 0);
  const uint all = simd_sum(lane < simdgroups ? owns[lane] : 0);
  list_tiles(tiles, expert, begin, all, thread_index, 32 * simdgroups, params);
  if (thread_index == 0) reinterpret_cast<device int*>(tiles + params.tiles)[expert] = begin + all;
  if (own == 0) return;
  uint next = begin + before;
  for (uint i = 0; i < steps; ++i) {
    const uint slot = first + i * 32 + lane;
    const uint here = slot < slots && expert_of(ids, slot, params) == expert ? 1 : 0;
    const uint rank = simd_prefix_exclusive_sum(here);
    if (here) order[next + rank] = slot;
    next += simd_sum(here);
  }
}
#endif

// ------------------------------------------------------------------------------------------ combine

// Grid: tokens along x, parts of H along y; each thread has one element.
template <typename T>
[[kernel]] void experts_combine(device const float* slots [[buffer(0)]], device const int* ids [[buffer(1)]],
                                device const T* weights [[buffer(2)]], device const T* shared [[buffer(3)]],
                                device const T* shared_gate [[buffer(4)]], device const T* residual [[buffer(5)]],
                                device T* output [[buffer(6)]], constant ExpertsParams& params [[buffer(7)]],
                                uint2 group [[threadgroup_position_in_grid]],
                                uint thread_index [[thread_index_in_threadgroup]],
                                uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint h = group.y * simdgroups * 32 + thread_index;
  if (group.x >= params.T || h >= params.H) return;
  const ulong token = group.x;
  float total = 0;
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = token * params.K + k;
    if (expert_of(ids, slot, params) < 0) continue;
    total += load(weights, slot, params.weights) * slots[slot * params.H + h];
  }
  output[token * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

// ------------------------------------------------------------------------------------------ on the matrix units

#if in_part(gather)
// Grid: sorted rows along x, parts of them along y, 16 bytes per thread. For all 16-bit dtypes.
[[host_name("experts_gather")]] [[kernel]] void experts_gather(
    device const uint4* x [[buffer(0)]], device const int* order [[buffer(1)]], device const int* ends [[buffer(2)]],
    device uint4* rows [[buffer(3)]], device int* index_of [[buffer(4)]], constant ExpertsParams& params [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint chunk = group.y * simdgroups * 32 + thread_index, chunks = params.H / 8;
  if (group.x >= uint(ends[params.E - 1]) || chunk >= chunks) return;
  const uint slot = order[group.x];
  if (chunk == 0) index_of[slot] = group.x;
  rows[ulong(group.x) * chunks + chunk] = x[ulong(slot / params.K) * chunks + chunk];
}
#endif

// Grid: sorted rows along x, parts of them along y, one inner element per thread.
template <typename T>
[[kernel]] void experts_activate(device const T* both [[buffer(0)]], device const int* ids [[buffer(1)]],
                                 device const int* order [[buffer(2)]], device const int* ends [[buffer(3)]],
                                 device const T* bias [[buffer(4)]], device T* inner [[buffer(5)]],
                                 constant ExpertsParams& params [[buffer(6)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]],
                                 uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint i = group.y * simdgroups * 32 + thread_index;
  if (group.x >= uint(ends[params.E - 1]) || i >= params.I) return;
  const int expert = expert_of(ids, order[group.x], params);
  device const T* row = both + ulong(group.x) * 2 * params.I;
  const float gate = float(row[gate_up_row(i, 0, params)]), up = float(row[gate_up_row(i, 1, params)]);
  inner[ulong(group.x) * params.I + i] = T(inner_value(gate, up, bias, expert, i, params));
}

// Grid: tokens along x, parts of H along y; each thread has one element.
template <typename T>
[[kernel]] void experts_combine_sorted(device const T* results [[buffer(0)]], device const int* index_of [[buffer(1)]],
                                       device const int* ids [[buffer(2)]], device const T* weights [[buffer(3)]],
                                       device const T* bias [[buffer(4)]], device const T* shared [[buffer(5)]],
                                       device const T* shared_gate [[buffer(6)]],
                                       device const T* residual [[buffer(7)]], device T* output [[buffer(8)]],
                                       constant ExpertsParams& params [[buffer(9)]],
                                       uint2 group [[threadgroup_position_in_grid]],
                                       uint thread_index [[thread_index_in_threadgroup]],
                                       uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint h = group.y * simdgroups * 32 + thread_index;
  if (group.x >= params.T || h >= params.H) return;
  const ulong token = group.x;
  const bool has_bias = params.down_bias != ParameterType::absent;
  float total = 0;
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = token * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const float result = float(results[ulong(index_of[slot]) * params.H + h]);
    const float biased = result + (has_bias ? load(bias, ulong(expert) * params.H + h, params.down_bias) : 0);
    total += load(weights, slot, params.weights) * biased;
  }
  output[token * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#if in_part(combine)
instantiate_dtypes("experts_combine", experts_combine)
#endif
#if in_part(activate)
instantiate_dtypes("experts_activate", experts_activate)
#endif
#if in_part(combine_sorted)
instantiate_dtypes("experts_combine_sorted", experts_combine_sorted)
#endif
