// What the tokens of linear_attention_ leave: outputs after gate and norm, rows of the log, and rows of `kept`.
#pragma once
#include "linear_attention_inputs.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ gate and norm

// The activation of the gate at an offset; 1 without a gate.
template <typename T>
float gate_at(device const T* gate, ulong offset, constant LinearAttentionParams& params) {
  return params.has_gate ? pointwise(float(gate[offset]), params.gate_activation) : 1;
}

MOE_METAL_CONSTANT uint kLaneColumns = 4;  // of a lane: a threadgroup has at most 128

// The norm's weights of a lane's columns. Those beyond the last are of no use.
template <typename T>
void load_weights(thread float* weights, device const T* from, uint columns, LinearAttentionThread at) {
  T loaded[kLaneColumns];
#pragma unroll
  for (uint n = 0; n < kLaneColumns; ++n) loaded[n] = from[min(at.lane + n * kSimdgroup, columns - 1)];
#pragma unroll
  for (uint n = 0; n < kLaneColumns; ++n) weights[n] = float(loaded[n]);
}

// The results of `count` tokens from `first` on, or floats for the second kernel. A simdgroup has a token.
template <typename T>
void store_outputs(thread const LinearAttentionTensors<T>& tensors, device T* output, uint first, uint count,
                   threadgroup const float* memory, thread const LinearAttentionWork& work, LinearAttentionThread at,
                   constant LinearAttentionParams& params) {
  if (at.simdgroup >= count) return;
  const bool has_skip = params.skip != ParameterType::absent, has_norm = params.norm_weight != ParameterType::absent;
  const bool has_gate = gates_here(params), gate_first = params.gate_first;
  const float skip = has_skip ? load(tensors.skip, work.head, params.skip) : 0;
  const uint head = params.in_groups ? work.head : output_head(work.head, params);
  const ulong weights_at = params.norms_groups ? ulong(work.head) * params.V : 0;
  const bool norms = has_norm && !params.in_groups;
  float weights[kLaneColumns], results[kLaneColumns];
  if (norms && params.norm_weight == ParameterType::float32) {
    load_weights(weights, reinterpret_cast<device const float*>(tensors.norm_weight) + weights_at, work.columns, at);
  } else if (norms) {
    load_weights(weights, tensors.norm_weight + weights_at, work.columns, at);
  }
  for (uint t = at.simdgroup; t < count; t += at.simdgroups) {
    threadgroup const float* values = memory + t * params.token_floats + 2 * params.key_rows + at.lane;
    threadgroup const float* gates = memory + (t + 1) * params.token_floats - params.tile_columns + at.lane;
    const ulong token = ulong(work.batch) * params.T + work.begin + first + t;
    const ulong row = (token * params.A + head) * params.V + work.first_column + at.lane;
    float squares = 0;
#pragma unroll
    for (uint n = 0; n < kLaneColumns; ++n) {
      const uint i = n * kSimdgroup;
      if (at.lane + i >= work.columns) continue;
      float x = values[params.tile_columns + i];
      if (has_skip) x = fma(skip, values[i], x);
      if (has_gate && gate_first) x *= gates[i];
      results[n] = x;
      squares = fma(x, x, squares);
    }
    const float factor = norms ? rsqrt(simd_sum(squares) / float(params.V) + params.eps) : 1;
#pragma unroll
    for (uint n = 0; n < kLaneColumns; ++n) {
      const uint i = n * kSimdgroup;
      if (at.lane + i >= work.columns) continue;
      float x = results[n];
      if (norms) x *= factor * weights[n];
      if (has_gate && !gate_first) x *= gates[i];
      if (params.in_groups) {
        reinterpret_cast<device float*>(output)[row + i] = x;
      } else {
        output[row + i] = T(x);
      }
    }
  }
}

// Zeros for the tokens before the first sequence, or after the last one.
template <typename T>
void store_zeros(device T* output, uint begin, uint end, thread const LinearAttentionWork& work,
                 LinearAttentionThread at, constant LinearAttentionParams& params) {
  const uint head = output_head(work.head, params);
  for (uint token = begin + at.simdgroup; token < end; token += at.simdgroups) {
    device T* row = output + (ulong(token) * params.A + head) * params.V + work.first_column;
    for (uint i = at.lane; i < work.columns; i += kSimdgroup) row[i] = T(0);
  }
}

// ------------------------------------------------------------------------------------------ log and kept

// Keys and decays of `count` tokens, into rows of the log from `row` on. compute_tokens stores their updates.
inline void store_log(device float* log, uint row, uint count, threadgroup const float* memory,
                      threadgroup const float* gates, thread const LinearAttentionWork& work, LinearAttentionThread at,
                      constant LinearAttentionParams& params) {
  if (!work.is_first_tile) return;
  threadgroup const float* decays = memory + 2 * (params.key_rows + params.tile_columns);
  const ulong decays_at = log_decays(params) + ulong(work.head) * (params.decays_channels ? params.D : 1);
  for (uint t = at.simdgroup; t < count; t += at.simdgroups) {
    device float* to = log_row(log, work, row + t, params);
    for (uint d = at.lane; d < params.D; d += kSimdgroup) {
      const ulong index = log_keys(params) + ulong(work.key_head) * params.D + d;
      if (work.has_key_head) to[index * params.log.element] = memory[t * params.token_floats + d];
      if (params.decays_channels) to[(decays_at + d) * params.log.element] = decays[t * params.token_floats + d];
    }
    if (!params.decays_channels && at.lane == 0) to[decays_at * params.log.element] = gates[t];
  }
}

// The last R rows of past and inputs.
template <typename T>
void store_kept(thread const LinearAttentionTensors<T>& tensors, device T* kept, thread const LinearAttentionWork& work,
                LinearAttentionThread at, constant LinearAttentionParams& params) {
  for (uint i = at.index; i < 2 * params.key_rows + params.tile_columns; i += at.threads) {
    const Channel<T> channel = channel_of(tensors, i, work, params);
    if (!channel.exists || (channel.part != Part::value && !work.has_key_head)) continue;
    device T* to = kept + work.sequence * params.kept.sequence + channel.index * params.kept.element;
    for (uint r = 0; r < params.R; ++r) {
      to[r * params.kept.row] = channel.raw(int(work.tokens) - int(params.R) + int(r));
    }
  }
}

}  // namespace moe_metal
