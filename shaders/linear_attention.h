// The tensors of the op linear_attention_, and the work of a threadgroup: the tokens of one sequence, one value head,
// and a tile of its columns.
#pragma once
#include "pointwise.h"
#include "rows.h"

namespace moe_metal {

// torch_moe_metal/recurrence.py has their shapes. Absent tensors are not read.
template <typename T>
struct LinearAttentionTensors {
  device const T* q;
  device const T* k;
  device const T* v;
  device const T* gate;
  device const T* decay;
  device const T* beta;
  device const T* log_rate;
  device const T* decay_bias;
  device const T* norm_weight;
  device const T* skip;
  device const T* conv_weight;
  device const T* conv_bias;
  device const T* past;
  device const uchar* mask;
};

struct LinearAttentionWork {
  uint sequence, head, key_head, head_of_group;
  uint batch, begin, tokens;  // where the tokens of the sequence are, and how many
  uint first_column, columns;
  bool is_first_tile;
  bool has_key_head;  // whether this threadgroup writes what the value heads of a key head share
};

// The position of a thread.
struct LinearAttentionThread {
  uint index, threads, simdgroup, simdgroups, lane;
};

// The highest of offsets[0] to offsets[n], limited to [0, T]. All lanes of a simdgroup get it.
inline uint limit_of(device const int* offsets, uint n, uint lane, constant LinearAttentionParams& params) {
  uint highest = 0;
  for (uint i = lane; i <= n; i += kSimdgroup) {
    const long offset = params.long_offsets ? reinterpret_cast<device const long*>(offsets)[i] : long(offsets[i]);
    const uint limited = offset < 0 ? 0 : offset > long(params.T) ? params.T : uint(offset);
    highest = limited > highest ? limited : highest;
  }
  return simd_max(highest);
}

inline LinearAttentionWork find_work(uint2 group, device const int* offsets, uint lane,
                                     constant LinearAttentionParams& params) {
  const uint of_group = params.A / params.J;
  LinearAttentionWork work;
  work.sequence = group.x / params.A;
  work.head = group.x % params.A;
  work.key_head = work.head / of_group;
  work.head_of_group = work.head % of_group;
  work.batch = work.sequence;
  work.begin = 0;
  work.tokens = params.T;
  if (params.has_offsets) {
    work.batch = 0;
    work.begin = limit_of(offsets, work.sequence, lane, params);
    work.tokens = limit_of(offsets, work.sequence + 1, lane, params) - work.begin;
  }
  work.first_column = group.y * params.tile_columns;
  work.columns = min(params.tile_columns, params.V - work.first_column);
  work.is_first_tile = group.y == 0;
  work.has_key_head = work.is_first_tile && work.head_of_group == 0;
  return work;
}

// The offset of a token in a tensor with heads, or of the first element of such a head.
inline ulong token_offset(constant HeadStrides& strides, LinearAttentionWork work, uint token) {
  return work.batch * strides.sequence + (ulong(work.begin) + token) * strides.row + work.key_head * strides.key_head +
         work.head_of_group * strides.head;
}

// The first element of a threadgroup's columns of the state.
inline device float* state_of(LinearAttentionWork work, device float* state, constant LinearAttentionParams& params) {
  return state + work.sequence * params.state.sequence + work.head * params.state.head +
         work.first_column * params.state.element;
}

inline ulong mask_offset(LinearAttentionWork work, uint token, constant LinearAttentionParams& params) {
  return work.batch * params.mask.sequence + (ulong(work.begin) + token) * params.mask.row;
}

// The first element of a row of the log.
inline device const float* log_row(device const float* log, LinearAttentionWork work, uint row,
                                   constant LinearAttentionParams& params) {
  return log + work.sequence * params.log.sequence + row * params.log.row;
}
inline device float* log_row(device float* log, LinearAttentionWork work, uint row,
                             constant LinearAttentionParams& params) {
  return log + work.sequence * params.log.sequence + row * params.log.row;
}
// What is in a row of the log before the keys, and before the decays.
inline ulong log_keys(constant LinearAttentionParams& params) { return ulong(params.A) * params.V; }
inline ulong log_decays(constant LinearAttentionParams& params) {
  return log_keys(params) + ulong(params.J) * params.D;
}

// Whether the kernel of the recurrence computes the gate, too.
inline bool gates_here(constant LinearAttentionParams& params) { return params.has_gate && !params.in_groups; }

// The index of a value head in the output.
inline uint output_head(uint head, constant LinearAttentionParams& params) {
  const uint of_group = params.A / params.J;
  return params.tiled ? head % of_group * params.J + head / of_group : head;
}

}  // namespace moe_metal
