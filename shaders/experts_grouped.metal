// The op experts for many slots with PyTorch's own two products (csrc/mps/grouped.h): six dispatches, three of which
// are here. experts_sort computes the order of the slots by expert, and the end of each expert's slots in it:
//
//   x         rows[i] = x[token of order[i]], places[order[i]] = i
//   PyTorch   both[i] = gate_up[expert] * rows[i]
//   inner     inner[i] = act(both[i] + gate_up_bias[expert])
//   PyTorch   results[i] = down[expert] * inner[i]
//   combine   output[token] = sum_k weights[k] * (results[places[k]] + down_bias[expert])
//                             + sigmoid(shared_gate) * shared + residual
//
// order and places are int [T * K], ends is int [E]; rows [T * K, H], both [T * K, 2I], inner [T * K, I] and results
// [T * K, H] have the activations' dtype, so there are three more roundings than in the other kernels. Slots with an id
// outside [0, E) belong to no expert; all rows from the last end on are undefined and not read.
#include <metal_stdlib>
using namespace metal;

#include "experts.h"

namespace moe_metal {

#if in_part(x)
// Grid: sorted rows along x, blocks of their 16-byte pieces along y, one piece per thread. For all 16-bit dtypes.
[[host_name("experts_grouped_x")]] [[kernel]] void experts_grouped_x(
    device const uint4* x [[buffer(0)]], device const int* order [[buffer(1)]], device const int* ends [[buffer(2)]],
    device uint4* rows [[buffer(3)]], device int* places [[buffer(4)]], constant ExpertsParams& params [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint piece = group.y * simdgroups * 32 + thread_index, pieces = params.H / 8;
  if (group.x >= uint(ends[params.E - 1]) || piece >= pieces) return;
  const uint slot = order[group.x];
  if (piece == 0) places[slot] = group.x;
  rows[ulong(group.x) * pieces + piece] = x[ulong(slot / params.K) * pieces + piece];
}
#endif

// Grid: sorted rows along x, blocks of inner elements along y, one element per thread.
template <typename T>
[[kernel]] void experts_grouped_inner(device const T* both [[buffer(0)]], device const int* ids [[buffer(1)]],
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

// Grid: tokens along x, blocks of H along y, one element per thread.
template <typename T>
[[kernel]] void experts_grouped_combine(
    device const T* results [[buffer(0)]], device const int* places [[buffer(1)]], device const int* ids [[buffer(2)]],
    device const T* weights [[buffer(3)]], device const T* bias [[buffer(4)]], device const T* shared [[buffer(5)]],
    device const T* shared_gate [[buffer(6)]], device const T* residual [[buffer(7)]], device T* output [[buffer(8)]],
    constant ExpertsParams& params [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint h = group.y * simdgroups * 32 + thread_index;
  if (group.x >= params.T || h >= params.H) return;
  const ulong token = group.x;
  const bool has_bias = params.down_bias != ParameterType::absent;
  float total = 0;
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = token * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const float result = float(results[ulong(places[slot]) * params.H + h]);
    const float biased = result + (has_bias ? load(bias, ulong(expert) * params.H + h, params.down_bias) : 0);
    total += load(weights, slot, params.weights) * biased;
  }
  output[token * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#if in_part(inner)
instantiate_dtypes("experts_grouped_inner", experts_grouped_inner)
#endif
#if in_part(combine)
instantiate_dtypes("experts_grouped_combine", experts_grouped_combine)
#endif
