// The state of a value head in registers, and what a token does to it.
//
// A lane has 16 rows and 4 columns of the state: rows 4 p + 4 KeyParts j + r for j, r < 4, where p is its key part. The
// lanes of a simdgroup are KeyParts by 32 / KeyParts columns of four. Four neighbours of the state along V are one
// register's vector; four along D are loaded together if those are neighbours in memory, as in Mamba 2's states.
#pragma once
#include "linear_attention.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kStateRows = 4;  // vectors of rows of a lane

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

// Makes the rows beyond D zero.
template <uint KeyParts>
void zero_rows(thread StateTile& tile, StateLane lane, constant LinearAttentionParams& params) {
  if (params.D == params.key_rows) return;
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

// `whole`: all rows and columns exist. Without conditions all loads can be under way at a time.
template <uint KeyParts, bool whole>
StateTile load_tile(device const float* state, uint columns, StateLane lane, constant LinearAttentionParams& params) {
  const ulong by_row = params.state.row, by_column = params.state.element;
  StateTile tile;
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
#pragma unroll
    for (uint n = 0; n < kVectorWidth; ++n) {
      tile.at[j][n] = 0;
      if (j * kVectorWidth * KeyParts >= params.key_rows) continue;
      if (params.layout == StateLayout::columns) {
        const bool exists = whole || (row + n < params.D && lane.column < columns);
        if (exists) tile.at[j][n] = load4_aligned(state + (row + n) * by_row + lane.column);
      } else if (params.layout == StateLayout::rows) {
        const bool exists = whole || (row < params.D && lane.column + n < columns);
        if (exists) tile.at[j][n] = load4_aligned(state + (lane.column + n) * by_column + row);
      } else if (params.layout == StateLayout::any) {
#pragma unroll
        for (uint c = 0; c < kVectorWidth; ++c) {
          const bool exists = whole || (row + n < params.D && lane.column + c < columns);
          if (exists) tile.at[j][n][c] = state[(row + n) * by_row + (lane.column + c) * by_column];
        }
      }
    }
  }
  if (params.layout == StateLayout::rows) transpose(tile);
  return tile;
}

template <uint KeyParts>
StateTile load_state(device const float* state, uint columns, StateLane lane, constant LinearAttentionParams& params) {
  const bool whole = params.D == params.key_rows && columns == params.tile_columns;
  return whole ? load_tile<KeyParts, true>(state, columns, lane, params)
               : load_tile<KeyParts, false>(state, columns, lane, params);
}

template <uint KeyParts>
void store_state(StateTile tile, device float* state, uint columns, StateLane lane,
                 constant LinearAttentionParams& params) {
  const ulong by_row = params.state.row, by_column = params.state.element;
  if (params.layout == StateLayout::rows) transpose(tile);
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
#pragma unroll
    for (uint n = 0; n < kVectorWidth; ++n) {
      if (params.layout == StateLayout::columns) {
        if (row + n < params.D && lane.column < columns) {
          store4_aligned(state + (row + n) * by_row + lane.column, tile.at[j][n]);
        }
      } else if (params.layout == StateLayout::rows) {
        if (row < params.D && lane.column + n < columns) {
          store4_aligned(state + (lane.column + n) * by_column + row, tile.at[j][n]);
        }
      } else if (params.layout == StateLayout::any) {
#pragma unroll
        for (uint c = 0; c < kVectorWidth; ++c) {
          const bool exists = row + n < params.D && lane.column + c < columns;
          if (exists) state[(row + n) * by_row + (lane.column + c) * by_column] = tile.at[j][n][c];
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ one token

inline float4 load4_aligned(threadgroup const float* at) { return *reinterpret_cast<threadgroup const float4*>(at); }

// S = a * S. The sums over the lane's rows of S with key (x) and query (y), of its four columns.
template <uint KeyParts, bool delta>
void decay_and_sum(thread StateTile& tile, threadgroup const float* token, float decay, StateLane lane,
                   thread float2* sums, constant LinearAttentionParams& params) {
  threadgroup const float* decays = token + 2 * (params.key_rows + params.tile_columns);
  float4 seen = 0, read = 0;
#pragma unroll
  for (uint j = 0; j < kStateRows; ++j) {
    const uint row = lane.row + j * kVectorWidth * KeyParts;
    if (j * kVectorWidth * KeyParts >= params.key_rows) continue;
    const float4 key = load4_aligned(token + row), query = load4_aligned(token + params.key_rows + row);
    const float4 factors = params.decays_channels ? load4_aligned(decays + row) : float4(decay);
#pragma unroll
    for (uint r = 0; r < kVectorWidth; ++r) {
      tile.at[j][r] *= factors[r];
      if (delta) seen = fma(float4(key[r]), tile.at[j][r], seen);
      read = fma(float4(query[r]), tile.at[j][r], read);
    }
  }
#pragma unroll
  for (uint c = 0; c < kVectorWidth; ++c) sums[c] = float2(seen[c], read[c]);
}

// Adds up the sums of all key parts. Each lane gets those of one column: the first one plus key_part % 4.
template <uint KeyParts>
float2 sum_of_column(thread const float2* sums, StateLane lane) {
  const bool second = lane.key_part & 1, other_half = lane.key_part & 2;
  const float2 first = (other_half ? sums[2] : sums[0]) + simd_shuffle_xor(other_half ? sums[0] : sums[2], 2);
  const float2 next = (other_half ? sums[3] : sums[1]) + simd_shuffle_xor(other_half ? sums[1] : sums[3], 2);
  float2 sum = (second ? next : first) + simd_shuffle_xor(second ? first : next, 1);
  if (KeyParts > 4) sum += simd_shuffle_xor(sum, 4);
  if (KeyParts > 8) sum += simd_shuffle_xor(sum, 8);
  return sum;
}

// The inverse: from each lane's column to four columns in each lane.
inline float4 columns_of_all(float value, StateLane lane) {
  const float other = simd_shuffle_xor(value, 1);
  const float2 two = lane.key_part & 1 ? float2(other, value) : float2(value, other);
  const float2 others = simd_shuffle_xor(two, 2);
  return lane.key_part & 2 ? float4(others, two) : float4(two, others);
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

// The same for a token of the log, whose update is where its value would be.
template <uint KeyParts>
void replay_token(thread StateTile& tile, threadgroup const float* token, float decay, StateLane lane,
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
  const float4 update = load4_aligned(token + 2 * params.key_rows + lane.column);
  update_state<KeyParts>(tile, token, update, lane, params);
}

// -> the update of the lane's column, whose output it stores. The output is that of the decayed old state plus what the
// update adds, so that one sum over all lanes is enough.
template <uint KeyParts, bool delta>
float next_token(thread StateTile& tile, threadgroup float* token, float decay, float beta, float product,
                 StateLane lane, constant LinearAttentionParams& params) {
  float2 sums[kVectorWidth];
  decay_and_sum<KeyParts, delta>(tile, token, decay, lane, sums, params);
  const float2 sum = sum_of_column<KeyParts>(sums, lane);
  threadgroup float* value = token + 2 * params.key_rows + lane.column + lane.key_part % kVectorWidth;
  const float update = beta * (delta ? *value - sum.x : *value);
  if (lane.key_part < kVectorWidth) value[params.tile_columns] = fma(product, update, sum.y);
  update_state<KeyParts>(tile, token, columns_of_all(update, lane), lane, params);
  return update;
}

}  // namespace moe_metal
