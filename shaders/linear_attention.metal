// The op linear_attention_: short convolution, norms of keys and queries, the recurrence of the state, gate and norm.
// torch_moe_metal/recurrence.py defines it.
//
// A threadgroup computes one sequence and value head: its state stays in registers (linear_attention_state.h) from the
// first token to the last. For blocks of up to kStateTokens tokens,
//
//   1. threads compute channels of keys, queries, values and gates, and factors (linear_attention_inputs.h),
//   2. simdgroups norm keys and queries of a token each,
//   3. all simdgroups, without a barrier, take the tokens in order: each has columns of its own,
//   4. simdgroups gate and norm the outputs of a token each, and store them as whole rows.
//
// Value heads that share a key head each compute its keys and queries: a few percent of the work. A block takes as many
// tokens as fit into kStateFloats, so that two threadgroups fit into the memory of a core. No result depends on that:
// the order of all sums is that of the tokens, however they are cut into blocks, calls or a log.
//
// Grid: all value heads of all sequences along x, tiles of columns along y. If the norm needs more than this
// threadgroup's columns, linear_attention_groups computes it from float32 results, with the gate.
#include <metal_stdlib>
using namespace metal;

#include "linear_attention_outputs.h"
#include "linear_attention_state.h"

namespace moe_metal {

// Computes a block of tokens. If they are logged, `updates` is the first element of their head in the log, and a lane
// stores the updates of its column.
template <uint KeyParts, bool delta>
void compute_tokens(thread StateTile& tile, uint count, threadgroup float* memory, threadgroup const float* gates,
                    device float* updates, bool is_logged, uint columns, StateLane lane,
                    constant LinearAttentionParams& params) {
  const uint column = lane.column + lane.key_part % kVectorWidth;
  is_logged = is_logged && lane.key_part < kVectorWidth && column < columns;
  updates += column * params.log.element;
  for (uint t = 0; t < count; ++t) {
    threadgroup float* token = memory + t * params.token_floats;
    const TokenGates its_gates = {gates[t], gates[kStateTokens + t], gates[2 * kStateTokens + t]};
    const float update = delta ? delta_token<KeyParts>(tile, token, its_gates, lane, params)
                               : sum_token<KeyParts>(tile, token, its_gates, lane, params);
    if (is_logged) updates[t * params.log.row] = update;
  }
}

#if in_part(keys64) || in_part(keys128) || in_part(keys256)
template <typename T, uint KeyParts>
[[kernel]] void linear_attention(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
                                 device const T* v [[buffer(2)]], device const T* gate [[buffer(3)]],
                                 device const T* decay [[buffer(4)]], device const T* beta [[buffer(5)]],
                                 device const T* log_rate [[buffer(6)]], device const T* decay_bias [[buffer(7)]],
                                 device const T* norm_weight [[buffer(8)]], device const T* skip [[buffer(9)]],
                                 device const T* conv_weight [[buffer(10)]], device const T* conv_bias [[buffer(11)]],
                                 device const T* past [[buffer(12)]], device const uchar* mask [[buffer(13)]],
                                 device const int* offsets [[buffer(14)]], device float* state [[buffer(15)]],
                                 device T* kept [[buffer(16)]], device float* log [[buffer(17)]],
                                 device T* output [[buffer(18)]], constant LinearAttentionParams& params [[buffer(19)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 uint thread_index [[thread_index_in_threadgroup]],
                                 uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float4 vectors[kStateFloats / kVectorWidth];
  threadgroup float gates[3 * kStateTokens];
  threadgroup LinearAttentionWork shared_work;
  if (group.x / params.A >= params.sequences || group.y >= params.tiles) return;
  threadgroup float* memory = reinterpret_cast<threadgroup float*>(vectors);
  LinearAttentionThread at;
  at.index = thread_index;
  at.threads = simdgroups * kSimdgroup;
  at.simdgroup = thread_index / kSimdgroup;
  at.simdgroups = simdgroups;
  at.lane = thread_index % kSimdgroup;
  const LinearAttentionTensors<T> tensors = {q,          k,           v,    gate,        decay,     beta, log_rate,
                                             decay_bias, norm_weight, skip, conv_weight, conv_bias, past, mask};
  const LinearAttentionWork found = find_work(group, offsets, at.lane, params);
  if (at.index == 0) shared_work = found;
  const StateLane lane = state_lane<KeyParts>(at);
  StateTile tile = load_state<KeyParts>(state_of(found, state, params), lane, params);
  if (params.has_offsets && !params.in_groups) {
    if (found.sequence == 0) store_zeros(output, 0, found.begin, found, at, params);
    if (found.sequence + 1 == params.sequences)
      store_zeros(output, found.begin + found.tokens, params.T, found, at, params);
  }
  if (params.R > 0) store_kept(tensors, kept, found, at, params);
  // Steps: replayed rows of the log, then tokens. The state is stored before the last L of them.
  const uint replay = params.replay, steps = replay + found.tokens, stored = steps - params.L;
  uint count = 0;
  for (uint step = 0; step < steps; step += count) {
    const uint end = step < replay ? replay : step < stored ? stored : steps, first = step - replay;
    const bool is_replayed = step < replay, is_logged = !is_replayed && step >= stored;
    count = min(params.block_tokens, end - step);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // until the previous tokens have been read
    // Read again for each block: that takes fewer registers than all that could be computed from it once.
    const LinearAttentionWork work = shared_work;
    if (is_replayed) {
      load_log(log, step, count, memory, gates, work, at, params);
    } else {
      load_tokens(tensors, first, count, memory, gates, work, at, params);
    }
    if (step == 0) settle_state<KeyParts>(tile, state_of(work, state, params), work.columns, lane, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint log_at = is_logged ? replay + step - stored : 0;
    device float* updates =
        log_row(log, work, log_at, params) + (ulong(work.head) * params.V + work.first_column) * params.log.element;
    if (is_replayed) {
      for (uint t = 0; t < count; ++t) {
        replay_token<KeyParts>(tile, memory + t * params.token_floats, gates[t], lane, params);
      }
    } else if (params.rule == Rule::delta) {
      compute_tokens<KeyParts, true>(tile, count, memory, gates, updates, is_logged, work.columns, lane, params);
    } else {
      compute_tokens<KeyParts, false>(tile, count, memory, gates, updates, is_logged, work.columns, lane, params);
    }
    if (step + count == stored) store_state<KeyParts>(tile, state_of(work, state, params), work.columns, lane, params);
    if (is_replayed) continue;
    if (is_logged) store_log(log, log_at, count, memory, gates, work, at, params);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_outputs(tensors, output, first, count, memory, work, at, params);
  }
}
#endif

#if in_part(groups)
// Gate and norm of the results of the first kernel, float32 [B, T, A, V]. Grid: rows of a norm along x.
template <typename T>
[[kernel]] void linear_attention_groups(device const float* results [[buffer(0)]], device const T* gate [[buffer(1)]],
                                        device const T* norm_weight [[buffer(2)]],
                                        device const int* offsets [[buffer(3)]], device T* output [[buffer(4)]],
                                        constant LinearAttentionParams& params [[buffer(5)]],
                                        uint group [[threadgroup_position_in_grid]],
                                        uint thread_index [[thread_index_in_threadgroup]],
                                        uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float2 partial[kMaxSimdgroups];
  const uint row = group % params.norm_rows, token = group / params.norm_rows, of_group = params.A / params.J;
  const uint batch = token / params.T, t = token % params.T, heads = params.A / params.norm_rows;
  if (batch >= (params.has_offsets ? 1 : params.sequences)) return;
  const uint threads = simdgroups * kSimdgroup, length = heads * params.V;
  bool exists = true;
  if (params.has_offsets) {
    const uint lane = thread_index % kSimdgroup;
    exists = t >= limit_of(offsets, 0, lane, params) && t < limit_of(offsets, params.sequences, lane, params);
  }
  results += ulong(group) * length;
  float2 squares = 0;
  for (uint pass = 0; pass < 2; ++pass) {
    const float mean = pass ? threadgroup_sum(squares, thread_index, simdgroups, partial).x / float(length) : 0;
    const float factor = rsqrt(mean + params.eps);
    for (uint i = thread_index; i < length; i += threads) {
      const uint head = row * heads + i / params.V, column = i % params.V;
      const float gated =
          gate_at(gate,
                  batch * params.gate.sequence + t * params.gate.row + head / of_group * params.gate.key_head +
                      head % of_group * params.gate.head + column * params.gate.element,
                  params);
      const float x = exists ? results[i] * (params.gate_first ? gated : 1) : 0;
      squares.x = fma(x, x, squares.x);
      if (pass == 0) continue;
      const float weight = load(norm_weight, (params.norms_groups ? row * length : 0) + i, params.norm_weight);
      const float y = x * factor * weight * (params.gate_first ? 1 : gated);
      output[(ulong(token) * params.A + output_head(head, params)) * params.V + column] = T(exists ? y : 0);
    }
  }
}
#endif

}  // namespace moe_metal

// clang-format off
#define instantiate_linear_attention(dtype, name, key_parts) \
  instantiate_kernel("linear_attention" name "_" #dtype, moe_metal::linear_attention<dtype, key_parts>)
#if in_part(keys64)
for_dtypes(instantiate_linear_attention, "_64", 8)
#endif
#if in_part(keys128)
for_dtypes(instantiate_linear_attention, "_128", 16)
#endif
#if in_part(keys256)
for_dtypes(instantiate_linear_attention, "_256", 32)
#endif
#if in_part(groups)
instantiate_dtypes("linear_attention_groups", linear_attention_groups)
#endif
