// The state of a value head in registers, and what a token does to it.
//
// A lane has 8 rows and 4 columns of the state: rows 4 p + 4 KeyParts j + r for j < 2, r < 4, where p is its key part.
// The lanes of a simdgroup are KeyParts by 32 / KeyParts columns of four. Four neighbours of the state along V are one
// register's vector; four along D are loaded together if those are neighbours in memory, as in Mamba 2's states.
#pragma once
#include "linear_attention.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kStateRows = 2;  // vectors of rows of a lane

struct StateTile {
  float4 at[kStateRows][kVectorWidth];  // [j][r]
};

struct StateLane {
  uint key_part;
  uint row;     // the first one
  uint column;  // of the tile
};

template <uint KeyParts>
StateLane state_lane(LinearAttentionThread at) {
  constexpr uint columns = kSimdgroup / KeyParts * kVectorWidth;
  StateLane lane;
  lane.key_part = at.lane % KeyParts;
  lane.row = kVectorWidth * lane.key_part;
  lane.column = at.simdgroup * columns + at.lane / KeyParts * kVectorWidth;
  return lane;
}

// ------------------------------------------------------------------------------------------ loads and stores

// Whether D may be any number, or is a multiple of the rows that the key parts have at a time. Only the kernel for long
// keys takes any number: the conditions for rows beyond D take many registers.
constexpr bool takes_any_rows(uint key_parts) { return key_parts == kSimdgroup; }

// Makes the rows beyond D zero.
template <uint KeyParts>
void zero_rows(thread StateTile& tile, StateLane lane, constant LinearAttentionParams& params) {
  if (!takes_any_rows(KeyParts) || params.D == params.key_rows) return;
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
#pragma unroll
    for (uint r = 0; r < kVectorWidth; ++r) {
      const uint row = lane.row + j * kVectorWidth * KeyParts + r;
      tile.at[j][r] = row < params.D ? tile.at[j][r] : float4(0);
    }
  }
}

// Exchanges four rows with four columns.
inline void transpose(thread StateTile& tile) {
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const float4 a = tile.at[j][0], b = tile.at[j][1], c = tile.at[j][2], d = tile.at[j][3];
    tile.at[j][0] = float4(a.x, b.x, c.x, d.x);
    tile.at[j][1] = float4(a.y, b.y, c.y, d.y);
    tile.at[j][2] = float4(a.z, b.z, c.z, d.z);
    tile.at[j][3] = float4(a.w, b.w, c.w, d.w);
  }
}

inline ulong element_of_state(uint row, uint column, constant LinearAttentionParams& params) {
  return row * params.state.row + column * params.state.element;
}

// Where four neighbours of the state are, which one instruction accesses: along V, or along D.
struct StateVectors {
  ulong first;  // of a lane
  ulong step;   // from one to the next
  ulong part;   // from one set of rows to the next

  ulong at(uint j, uint n) const thread { return first + j * part + n * step; }
};

template <uint KeyParts>
StateVectors state_vectors(StateLane lane, constant LinearAttentionParams& params) {
  StateVectors vectors;
  vectors.first = element_of_state(lane.row, lane.column, params);
  vectors.step = params.layout == StateLayout::rows ? params.state.element : params.state.row;
  vectors.part = kVectorWidth * KeyParts * params.state.row;
  return vectors;
}

// Begins to load the state: nothing here needs the values, so that the loads are under way while others begin.
// settle_state must follow.
template <uint KeyParts>
StateTile load_state(device const float* state, StateLane lane, constant LinearAttentionParams& params) {
  const StateVectors vectors = state_vectors<KeyParts>(lane, params);
  const bool loads = params.layout == StateLayout::columns || params.layout == StateLayout::rows;
  StateTile tile;  // without a first value, which would have to wait for the loads
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    if (!loads || j * kVectorWidth * KeyParts >= params.key_rows) continue;
#pragma unroll
    for (uint n = 0; n < kVectorWidth; ++n) tile.at[j][n] = load4_aligned(state + vectors.at(j, n));
  }
  return tile;
}

// The rest: rows become columns, and a state whose neighbours are not together is loaded one element at a time.
template <uint KeyParts>
void settle_state(thread StateTile& tile, device const float* state, uint columns, StateLane lane,
                  constant LinearAttentionParams& params) {
  if (params.layout == StateLayout::columns) return;
  if (params.layout == StateLayout::rows) return transpose(tile);
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
#pragma unroll
    for (uint i = 0; i < kVectorWidth * kVectorWidth; ++i) {
      const uint row = lane.row + j * kVectorWidth * KeyParts + i / kVectorWidth;
      const uint column = lane.column + i % kVectorWidth;
      const bool exists = params.layout == StateLayout::any && row < params.D && column < columns;
      tile.at[j][i / kVectorWidth][i % kVectorWidth] = exists ? state[element_of_state(row, column, params)] : 0;
    }
  }
}

template <uint KeyParts>
void store_state(StateTile tile, device float* state, uint columns, StateLane lane,
                 constant LinearAttentionParams& params) {
  if (params.layout == StateLayout::rows) transpose(tile);
  const StateVectors vectors = state_vectors<KeyParts>(lane, params);
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    if (params.layout == StateLayout::absent || j * kVectorWidth * KeyParts >= params.key_rows) continue;
    if (params.layout != StateLayout::any) {
#pragma unroll
      for (uint n = 0; n < kVectorWidth; ++n) store4_aligned(state + vectors.at(j, n), tile.at[j][n]);
      continue;
    }
#pragma unroll
    for (uint i = 0; i < kVectorWidth * kVectorWidth; ++i) {
      const uint row = lane.row + j * kVectorWidth * KeyParts + i / kVectorWidth;
      const uint column = lane.column + i % kVectorWidth;
      const bool exists = row < params.D && column < columns;
      if (exists) state[element_of_state(row, column, params)] = tile.at[j][i / kVectorWidth][i % kVectorWidth];
    }
  }
}

// ------------------------------------------------------------------------------------------ one token

inline float4 load4_aligned(threadgroup const float* at) { return *reinterpret_cast<threadgroup const float4*>(at); }

// S = a * S
template <uint KeyParts>
void decay_state(thread StateTile& tile, threadgroup const float* token, float decay, StateLane lane,
                 constant LinearAttentionParams& params) {
  threadgroup const float* decays = token + 2 * (params.key_rows + params.tile_columns);
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
    if (j * kVectorWidth * KeyParts >= params.key_rows) continue;
    const float4 factors = params.decays_channels ? load4_aligned(decays + row) : float4(decay);
#pragma unroll
    for (uint r = 0; r < kVectorWidth; ++r) tile.at[j][r] *= factors[r];
  }
}

// S = S + outer(key, update). Rows beyond D stay 0, also if an update is infinite.
template <uint KeyParts>
void update_state(thread StateTile& tile, threadgroup const float* token, float4 update, StateLane lane,
                  constant LinearAttentionParams& params) {
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
    if (j * kVectorWidth * KeyParts >= params.key_rows) continue;
    const float4 key = load4_aligned(token + row);
#pragma unroll
    for (uint r = 0; r < kVectorWidth; ++r) tile.at[j][r] = fma(float4(key[r]), update, tile.at[j][r]);
  }
  zero_rows<KeyParts>(tile, lane, params);
}

// vector @ S, of the lane's rows and columns.
template <uint KeyParts>
float4 product_of_rows(thread const StateTile& tile, threadgroup const float* vector, StateLane lane,
                       constant LinearAttentionParams& params) {
  float4 sum = 0;
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
    if (j * kVectorWidth * KeyParts >= params.key_rows) continue;
    const float4 factors = load4_aligned(vector + row);
#pragma unroll
    for (uint r = 0; r < kVectorWidth; ++r) sum = fma(float4(factors[r]), tile.at[j][r], sum);
  }
  return sum;
}

// Adds up the sums of all key parts. Each lane gets that of one column: the first one plus key_part % 4. `Sum` is
// float, or float2 for two sums.
template <uint KeyParts, typename Sum>
Sum sum_of_column(thread const Sum* sums, StateLane lane) {
  const bool is_odd = lane.key_part & 1, is_upper = lane.key_part & 2;
  const Sum first = (is_upper ? sums[2] : sums[0]) + simd_shuffle_xor(is_upper ? sums[0] : sums[2], 2);
  const Sum second = (is_upper ? sums[3] : sums[1]) + simd_shuffle_xor(is_upper ? sums[1] : sums[3], 2);
  Sum sum = (is_odd ? second : first) + simd_shuffle_xor(is_odd ? first : second, 1);
  if (KeyParts > 4) sum += simd_shuffle_xor(sum, 4);
  if (KeyParts > 8) sum += simd_shuffle_xor(sum, 8);
  if (KeyParts > 16) sum += simd_shuffle_xor(sum, 16);
  return sum;
}

// The inverse: from each lane's column to four columns in each lane.
inline float4 columns_of_all(float value, StateLane lane) {
  const float other = simd_shuffle_xor(value, 1);
  const float2 two = lane.key_part & 1 ? float2(other, value) : float2(value, other);
  const float2 others = simd_shuffle_xor(two, 2);
  return lane.key_part & 2 ? float4(others, two) : float4(two, others);
}

// The factors of a token.
struct TokenGates {
  float decay, beta;
  float product;  // of query and key
};

// A token of the delta rule. -> the update of the lane's column, whose output it stores. The output is that of the
// decayed old state plus what the update adds, so that one sum over all lanes is enough.
template <uint KeyParts>
float delta_token(thread StateTile& tile, threadgroup float* token, TokenGates gates, StateLane lane,
                  constant LinearAttentionParams& params) {
  decay_state<KeyParts>(tile, token, gates.decay, lane, params);
  const float4 seen = product_of_rows<KeyParts>(tile, token, lane, params);
  const float4 read = product_of_rows<KeyParts>(tile, token + params.key_rows, lane, params);
  const float2 sums[kVectorWidth] = {float2(seen.x, read.x), float2(seen.y, read.y), float2(seen.z, read.z),
                                     float2(seen.w, read.w)};
  const float2 sum = sum_of_column<KeyParts>(sums, lane);
  threadgroup float* value = token + 2 * params.key_rows + lane.column + lane.key_part % kVectorWidth;
  const float update = gates.beta * (*value - sum.x);
  if (lane.key_part < kVectorWidth) value[params.tile_columns] = fma(gates.product, update, sum.y);
  update_state<KeyParts>(tile, token, columns_of_all(update, lane), lane, params);
  return update;
}

// The same for the rule "sum", whose updates do not depend on the state.
template <uint KeyParts>
float sum_token(thread StateTile& tile, threadgroup float* token, TokenGates gates, StateLane lane,
                constant LinearAttentionParams& params) {
  threadgroup float* values = token + 2 * params.key_rows + lane.column;
  decay_state<KeyParts>(tile, token, gates.decay, lane, params);
  update_state<KeyParts>(tile, token, gates.beta * load4_aligned(values), lane, params);
  const float4 read = product_of_rows<KeyParts>(tile, token + params.key_rows, lane, params);
  const float sums[kVectorWidth] = {read.x, read.y, read.z, read.w};
  const float sum = sum_of_column<KeyParts>(sums, lane);
  threadgroup float* value = values + lane.key_part % kVectorWidth;
  if (lane.key_part < kVectorWidth) value[params.tile_columns] = sum;
  return gates.beta * *value;
}

// A token of the log, whose update is where its value would be.
template <uint KeyParts>
void replay_token(thread StateTile& tile, threadgroup const float* token, float decay, StateLane lane,
                  constant LinearAttentionParams& params) {
  decay_state<KeyParts>(tile, token, decay, lane, params);
  update_state<KeyParts>(tile, token, load4_aligned(token + 2 * params.key_rows + lane.column), lane, params);
}

}  // namespace moe_metal
