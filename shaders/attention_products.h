// The two products of the kernel attention: scores^T = k * q^T, and output^T = v^T * weights^T.
#pragma once
#include "attention_rows.h"
#include "weights.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ loads

// Elements `column` to column + 7 of a row, or 0 beyond its end. Wide rows consist of whole aligned chunks. These are
// converted only when they are needed, so that all loads are issued before the first one is waited for. Beyond the end
// the last chunk is loaded, and values_of makes it 0 if its mask is 0. A conditional would be turned into a branch
// around the load.
template <bool wide, typename T>
struct Chunk {
  uint4 bits[2 / Wide<T>::vectors];
};
template <typename T>
struct Chunk<false, T> {
  Vectors<2> values;
};
// How many of them a lane loads before it multiplies the first one, in 32 registers, and how many tiles of keys these
// are.
template <bool wide, typename T>
struct AtOnce {
  enum : uint { chunks = wide ? 4 * Wide<T>::vectors : 4, tiles = chunks / kKeyFragments };
};
template <typename T>
void load_chunk(device const T* row, ulong, uint column, uint length, thread Chunk<true, T>& chunk) {
  device const uint4* from = reinterpret_cast<device const uint4*>(row + min(column, length - 8));
  for (uint n = 0; n < 2 / Wide<T>::vectors; ++n) chunk.bits[n] = from[n];
}
template <typename T>
void load_chunk(device const T* row, ulong stride, uint column, uint length, thread Chunk<false, T>& chunk) {
#pragma unroll
  for (uint n = 0; n < 8; ++n) {
    const bool inside = column + n < length;
    const float value = float(row[inside ? (column + n) * stride : 0]);
    chunk.values.at[n / 4][n % 4] = inside ? value : 0;
  }
}
template <typename T>
Vectors<2> values_of(thread const Chunk<true, T>& chunk, uint mask) {
  uint4 bits[2 / Wide<T>::vectors];
  for (uint n = 0; n < 2 / Wide<T>::vectors; ++n) bits[n] = chunk.bits[n] & mask;
  Vectors<2> values;
  to_floats<T>(bits, values);
  return values;
}
template <typename T>
Vectors<2> values_of(thread const Chunk<false, T>& chunk, uint) {
  return chunk.values;
}

// What a lane has of a tile of q: for its two rows, the columns that correspond to its columns of keys.
struct QueryTile {
  float4 row[2];
};
template <bool wide, typename T>
void load_query(device const T* row, uint column, constant AttentionParams& params, thread float4& values) {
  if (wide) {
    vec<T, 4> four = *reinterpret_cast<device const vec<T, 4>*>(row + min(column, params.D - 4));
    if (column >= params.D) four = vec<T, 4>(T(0));
    values = float4(float(four.x), float(four.y), float(four.z), float(four.w));
    return;
  }
#pragma unroll
  for (uint n = 0; n < 4; ++n) {
    const bool inside = column + n < params.D;
    const float value = float(row[inside ? (column + n) * params.q.element : 0]);
    values[n] = inside ? value : 0;
  }
}

template <typename T>
struct QueryRows {
  device const T* row[2];
};
template <bool wide, typename T>
void load_query_tile(QueryRows<T> queries, uint tile, FragmentElement element, constant AttentionParams& params,
                     thread QueryTile& q) {
#pragma unroll
  for (uint e = 0; e < 2; ++e) {
    load_query<wide>(queries.row[e], tile * kAttentionKeyColumns + 4 * element.row, params, q.row[e]);
  }
}

// ------------------------------------------------------------------------------------------ scores

// The scores of 32 keys, later their weights: at[n] are for key 8 * n + row and the lane's two rows.
struct Scores {
  float2 at[kKeyFragments];
};

// Adds the products of `Count` tiles of 32 keys, of which this part of the columns has every params.column_parts-th,
// with those of q. All loads are issued before the first product.
template <bool wide, uint Count, typename T>
void add_tiles(thread Scores& scores, device const T* k, uint first_key, uint tile, thread const QueryTile* q,
               FragmentElement element, constant AttentionParams& params) {
  Chunk<wide, T> chunks[Count][kKeyFragments];
#pragma unroll
  for (uint c = 0; c < Count; ++c) {
    const uint column = (tile + c * params.column_parts) * kAttentionKeyColumns + 4 * element.column;
#pragma unroll
    for (uint n = 0; n < kKeyFragments; ++n) {
      device const T* key = k + min(first_key + 8 * n + element.row, params.S - 1) * params.k.row;
      load_chunk(key, params.k.element, column, params.D, chunks[c][n]);
    }
  }
#pragma unroll
  for (uint c = 0; c < Count; ++c) {
    const uint column = (tile + c * params.column_parts) * kAttentionKeyColumns + 4 * element.column;
    const uint mask = column < params.D ? 0xffffffff : 0;
#pragma unroll
    for (uint n = 0; n < kKeyFragments; ++n) {
      const Vectors<2> chunk = values_of(chunks[c][n], mask);
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        multiply_add(scores.at[n], float2(chunk.at[0][i], chunk.at[1][i]), float2(q[c].row[0][i], q[c].row[1][i]));
      }
    }
  }
}

// Adds up the products of the parts of the columns. It is safe to write `partial` again in the second call after this
// one, because of the barrier in between.
inline void sum_column_parts(thread Scores& scores, threadgroup float2* partial, AttentionPosition position,
                             uint column_parts) {
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) {
    partial[(position.simdgroup * kKeyFragments + n) * kSimdgroup + position.lane] = scores.at[n];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) {
    float2 sum = 0;
    for (uint s = position.simdgroup - position.column_part;
         s < position.simdgroup - position.column_part + column_parts; ++s) {
      sum += partial[(s * kKeyFragments + n) * kSimdgroup + position.lane];
    }
    scores.at[n] = sum;
  }
}

// ------------------------------------------------------------------------------------------ values

// Loads a lane's chunks of a tile of values, from fragment `first` on.
template <bool wide, typename T>
void load_values(device const T* v, uint first_key, uint first, uint column, FragmentElement element,
                 constant AttentionParams& params, thread Chunk<wide, T>* chunks) {
#pragma unroll
  for (uint n = 0; n < AtOnce<wide, T>::chunks; ++n) {
    device const T* value =
        v + min(first_key + 8 * (first + n / 2) + element.column + n % 2, params.S - 1) * params.v.row;
    load_chunk(value, params.v.element, column, params.V, chunks[n]);
  }
}
// sums += weights * values. Sums of columns beyond the end are not used.
template <bool wide, typename T>
void add_values(thread float2* sums, thread const Scores& weights, uint first, thread const Chunk<wide, T>* chunks) {
#pragma unroll
  for (uint n = 0; n < AtOnce<wide, T>::chunks; n += 2) {
    const Vectors<2> even = values_of(chunks[n], 0xffffffff), odd = values_of(chunks[n + 1], 0xffffffff);
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      multiply_add(sums[i], float2(even.at[i / 4][i % 4], odd.at[i / 4][i % 4]), weights.at[first + n / 2]);
    }
  }
}

// Adds a tile of values key by key, skipping keys that are not seen: their values times 0 may be NaN.
template <bool wide, typename T>
void add_seen_values(thread float2* sums, thread const Scores& weights, uint seen, device const T* v, uint first_key,
                     uint column, AttentionPosition position, constant AttentionParams& params) {
  for (uint key = 0; key < 8; ++key) {
    const ushort lane = (position.lane & 9) | key % 4 * 2 | key / 4 * 16;  // the lane with the key and this lane's rows
    const uint key_seen = simd_shuffle(seen, lane);
#pragma unroll
    for (uint n = 0; n < kKeyFragments; ++n) {
      const float2 weight = simd_shuffle(weights.at[n], lane);
      Chunk<wide, T> loaded;
      load_chunk(v + min(first_key + 8 * n + key, params.S - 1) * params.v.row, params.v.element, column, params.V,
                 loaded);
      const Vectors<2> chunk = values_of(loaded, 0xffffffff);
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) {
          if (key_seen >> (2 * n + e) & 1) sums[i][e] += weight[e] * chunk.at[i / 4][i % 4];
        }
      }
    }
  }
}

}  // namespace moe_metal
