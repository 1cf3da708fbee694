// The op attention: output = softmax(scores) * v, where scores = softcap(scale * q * k) + mask, over the keys that each
// query sees.
//
// q [B, A, T, D], k [B, J, S, D], v [B, J, S, V] and mask [B, A, T, S] with any strides; sinks [A]; output
// [B, T, A, V]. With several parts of the keys, this kernel writes partial results for attention_combine.metal to one
// buffer: stats [B, J, rows, parts], then sums [B, J, rows, parts, V], with V rounded up to whole vectors.
//
// The queries of all heads that share a key head are the rows of one matrix: row r is query r / (A / J) of head
// r % (A / J) among them. A simdgroup has a tile of 8 rows and a range of keys. It loads 32 keys at a time, once for
// all rows, with an online softmax: scores are only in registers. Products are transposed: scores^T = k * q^T, and
// output^T = v^T * weights^T. A lane has two rows of q. So the weights are in the lanes where the second product needs
// them, and a row's scale factor is known to the lanes that have its sums.
//
// The order of summed columns is free if both factors use the same one. A tile of keys has 32 columns: each of the four
// lanes of a key has a chunk of 8 neighbours, which take one or two loads; fragment i of 4 multiplies elements i and
// i + 4 of each chunk. A tile of values has 64 columns: each of the 8 lanes of two keys has a chunk of 8 neighbours of
// both; fragment i of 8 multiplies element i.
//
// attention: simdgroups of a threadgroup = row_tiles * column_parts * key_parts.
//   row_tiles      have different tiles of 8 rows
//   column_parts   have the same rows, and divide the columns of long keys and values
//   key_parts      have the same rows and columns; each reads other 32 keys
// Grid: row_threadgroups of each sequence and key head along x. Along y, parts of the keys and, for values that are
// longer than a threadgroup can take, parts of their columns, which compute the scores again.
//
// A lane has few waits for memory: it loads 128 bytes at a time (of 16-bit numbers: 64 columns of 32 keys), and the
// first values before the softmax of the scores. That takes 32 registers, and q and the sums of its rows as many each.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "attention.h"
#include "attention_products.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ the softmax

// A lane's state of its two rows: the highest score so far, the sum of the weights exp(score - highest) (until the end
// only of keys in the lane's row of fragments), and the sums of the weighted values.
template <uint ValueTiles>
struct Attended {
  float2 highest, total;
  float2 sums[8 * ValueTiles];
};

inline float2 higher(float2 a, float2 b) { return float2(b.x > a.x ? b.x : a.x, b.y > a.y ? b.y : a.y); }

// Reductions over the lanes with the same rows and other keys.
inline float2 highest_of_all(float2 value) {
  value = higher(value, simd_shuffle_xor(value, 2));
  value = higher(value, simd_shuffle_xor(value, 4));
  return higher(value, simd_shuffle_xor(value, 16));
}
inline float2 sum_of_all(float2 value) {
  value += simd_shuffle_xor(value, 2);
  value += simd_shuffle_xor(value, 4);
  return value + simd_shuffle_xor(value, 16);
}

// Converts scores to weights, and scales the sums so far to the new highest score. -> which keys are seen: bit
// 2 * n + e is for at[n][e]
template <typename T, uint ValueTiles>
uint weigh(thread Attended<ValueTiles>& attended, thread Scores& scores, uint first_key,
           thread const AttentionRow* rows, device const uchar* mask, FragmentElement element,
           constant AttentionParams& params) {
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) {
    const uint key = first_key + 8 * n + element.row;
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      const bool is_seen = key >= rows[e].keys.first && key < rows[e].keys.end;
      scores.at[n][e] = is_seen ? scores.at[n][e] * params.scale : -INFINITY;
    }
  }
  if (params.softcap != 0 || params.mask_type != MaskType::absent) {
#pragma unroll
    for (uint n = 0; n < kKeyFragments; ++n) {
      const uint key = first_key + 8 * n + element.row;
#pragma unroll
      for (uint e = 0; e < 2; ++e) scores.at[n][e] = masked<T>(scores.at[n][e], key, rows[e], mask, params);
    }
  }
  float2 highest = attended.highest;
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) highest = higher(highest, scores.at[n]);
  highest = highest_of_all(highest);
  const float2 offset = offset_of(highest), factor = exp(attended.highest - offset);
  attended.highest = highest;
  attended.total *= factor;
#pragma unroll
  for (uint i = 0; i < 8 * ValueTiles; ++i) attended.sums[i] *= factor;
  uint seen = 0;
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) {
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      const bool is_seen = scores.at[n][e] != -INFINITY;
      seen |= uint(is_seen) << (2 * n + e);
      scores.at[n][e] = is_seen ? exp(scores.at[n][e] - offset[e]) : 0;
    }
    attended.total += scores.at[n];
  }
  return seen;
}

// ------------------------------------------------------------------------------------------ a part of the keys

template <typename T, uint KeyTiles>
struct AttentionWork {
  device const T* k;
  device const T* v;
  device const uchar* mask;
  QueryRows<T> queries;
  AttentionRow rows[2];
  QueryTile q[KeyTiles];  // the first tiles of this part of the columns; others are loaded again for each 32 keys
  uint first_tile;        // of v, of this part of the columns
};

template <bool wide, typename T, uint KeyTiles>
void score_keys(thread Scores& scores, thread const AttentionWork<T, KeyTiles>& work, uint first_key,
                AttentionPosition position, constant AttentionParams& params) {
#pragma unroll
  for (uint n = 0; n < kKeyFragments; ++n) scores.at[n] = 0;
  const uint tiles = (params.D + kAttentionKeyColumns - 1) / kAttentionKeyColumns;
  constexpr uint at_once = AtOnce<wide, T>::tiles;
#pragma unroll
  for (uint c = 0; c < KeyTiles; c += at_once) {
    const uint tile = position.column_part + c * params.column_parts;
    if (tile + (at_once - 1) * params.column_parts < tiles) {
      add_tiles<wide, at_once>(scores, work.k, first_key, tile, work.q + c, position.element, params);
    } else if (tile < tiles) {
      add_tiles<wide, 1>(scores, work.k, first_key, tile, work.q + c, position.element, params);
    }
  }
  for (uint tile = position.column_part + KeyTiles * params.column_parts; tile < tiles; tile += params.column_parts) {
    QueryTile q;
    load_query_tile<wide>(work.queries, tile, position.element, params, q);
    add_tiles<wide, 1>(scores, work.k, first_key, tile, &q, position.element, params);
  }
}

template <bool wide, uint ValueTiles, typename T, uint KeyTiles>
void attend(thread Attended<ValueTiles>& attended, thread const AttentionWork<T, KeyTiles>& work, SeenKeys keys,
            bool careful, threadgroup float2* memory, AttentionPosition position, constant AttentionParams& params) {
  attended.highest = -INFINITY;
  attended.total = 0;
#pragma unroll
  for (uint i = 0; i < 8 * ValueTiles; ++i) attended.sums[i] = 0;
  // All parts of the keys take the same number of steps, because of barriers.
  const uint step = position.key_parts * kAttentionKeys;
  uint buffer = 0;  // the offset of one of the two that sum_column_parts uses alternately
  for (uint first = keys.first; first < keys.end; first += step) {
    const uint first_key = first + position.key_part * kAttentionKeys;
    Scores scores;
    score_keys<wide>(scores, work, first_key, position, params);
    // The first values, which are loaded during the softmax.
    const uint first_column = work.first_tile * kAttentionValueColumns + 8 * position.element.row;
    Chunk<wide, T> chunks[AtOnce<wide, T>::chunks];
    load_values<wide>(work.v, first_key, 0, first_column, position.element, params, chunks);
    if (params.column_parts > 1) sum_column_parts(scores, memory + buffer, position, params.column_parts);
    buffer = kAttentionSimdgroups * kKeyFragments * kSimdgroup - buffer;
    const uint seen = weigh<T>(attended, scores, first_key, work.rows, work.mask, position.element, params);
#pragma unroll
    for (uint c = 0; c < ValueTiles; ++c) {
      const uint tile = work.first_tile + c * params.column_parts;
      const uint column = tile * kAttentionValueColumns + 8 * position.element.row;
      if (tile * kAttentionValueColumns >= params.V) continue;
      if (careful) {
        add_seen_values<wide>(attended.sums + 8 * c, scores, seen, work.v, first_key, column, position, params);
        continue;
      }
#pragma unroll
      for (uint n = 0; n < kKeyFragments; n += AtOnce<wide, T>::chunks / 2) {
        if (c + n != 0) load_values<wide>(work.v, first_key, n, column, position.element, params, chunks);
        add_values(attended.sums + 8 * c, scores, n, chunks);
      }
    }
  }
  attended.total = sum_of_all(attended.total);
}

// Writes a simdgroup's results to threadgroup memory, for store_rows. -> whether all sums of the threadgroup are
// finite. If not, the reason may be a key that is not seen.
template <uint ValueTiles>
bool store_sums(thread const Attended<ValueTiles>& attended, threadgroup float2* memory, threadgroup float4* stats,
                threadgroup uint* finite, AttentionPosition position) {
  float2 none = 0;
#pragma unroll
  for (uint i = 0; i < 8 * ValueTiles; ++i) none += attended.sums[i] * 0;
  const bool is_finite = simd_all(none.x == 0 && none.y == 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // until the parts of the columns have read their scores
  if (position.lane == 0) finite[position.simdgroup] = is_finite;
  stats[position.simdgroup * kSimdgroup + position.lane] = float4(attended.highest, attended.total);
#pragma unroll
  for (uint i = 0; i < 8 * ValueTiles; ++i) {
    memory[(position.simdgroup * 8 * ValueTiles + i) * kSimdgroup + position.lane] = attended.sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool all = true;
  for (uint s = 0; s < kAttentionSimdgroups; ++s) all = all && finite[s];
  return all;
}

// ------------------------------------------------------------------------------------------ results

// Adds up the results of the simdgroups that divide the keys of a row tile, in their order. Stores the results of its
// rows, or the partial results of one part, as floats. These simdgroups divide the columns, four at a time.
template <typename T, uint ValueTiles>
void store_rows(threadgroup const float2* memory, threadgroup const float4* stats, thread const AttentionRow* rows,
                uint first_tile, ulong first_row, uint part, device const T* sinks, device T* output, Head head,
                AttentionPosition position, constant AttentionParams& params) {
  const uint step = params.column_parts * params.row_tiles;
  const uint first = position.column_part + position.row_tile * params.column_parts;
  float2 highest = -INFINITY;
  for (uint s = first; s < kAttentionSimdgroups; s += step) {
    highest = higher(highest, stats[s * kSimdgroup + position.lane].xy);
  }
  const float2 offset = offset_of(highest);
  device float* parts = reinterpret_cast<device float*>(output);
  RowShape shape;
  shape.length = params.V;
  shape.aligned = params.V % kVectorWidth == 0;
  for (uint four = position.key_part; four < 2 * ValueTiles; four += position.key_parts) {
    const uint tile = first_tile + four / 2 * params.column_parts;
    const uint column = tile * kAttentionValueColumns + 8 * position.element.row + four % 2 * 4;
    if (column >= params.V) continue;
    float2 total = 0;
    float4 sums[2] = {float4(0), float4(0)};
    for (uint s = first; s < kAttentionSimdgroups; s += step) {
      const float4 other = stats[s * kSimdgroup + position.lane];
      const float2 factor = exp(other.xy - offset);
      total += other.zw * factor;
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const float2 sum = memory[((s * 2 * ValueTiles + four) * 4 + i) * kSimdgroup + position.lane] * factor;
        sums[0][i] += sum.x;
        sums[1][i] += sum.y;
      }
    }
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      if (!rows[e].exists) continue;
      if (params.parts == 1) {
        const ulong row = (head.sequence * params.T + rows[e].query) * params.A + rows[e].head;
        const float factor = sums_factor(highest[e], total[e], rows[e].head, sinks, params);
        store4(output + row * params.V, column, sums[e] * factor, shape);
        continue;
      }
      const ulong row = (first_row + position.element.column + e) * params.parts + part;
      store4_aligned(parts + params.sums_offset + row * part_columns(params) + column, sums[e]);
      if (column == 0) reinterpret_cast<device float2*>(parts)[row] = float2(highest[e], total[e]);
    }
  }
}

template <bool wide, typename T, uint KeyTiles>
void find_work(thread AttentionWork<T, KeyTiles>& work, device const T* q, device const T* k, device const T* v,
               Head head, uint first_row, SeenKeys keys, AttentionPosition position, constant AttentionParams& params) {
  work.k = k + head.sequence * params.k.sequence + head.key_head * params.k.head;
  work.v = v + head.sequence * params.v.sequence + head.key_head * params.v.head;
#pragma unroll
  for (uint e = 0; e < 2; ++e) {
    const AttentionRow row = attention_row(first_row + position.element.column + e, head, keys, params);
    work.rows[e] = row;
    work.queries.row[e] = q + head.sequence * params.q.sequence + row.head * params.q.head + row.query * params.q.row;
  }
#pragma unroll
  for (uint c = 0; c < KeyTiles; ++c) {
    load_query_tile<wide>(work.queries, position.column_part + c * params.column_parts, position.element, params,
                          work.q[c]);
  }
}

template <typename T, bool wide, uint KeyTiles, uint ValueTiles>
[[kernel]] void attention(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
                          device const T* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
                          device const T* sinks [[buffer(4)]], device T* output [[buffer(5)]],
                          constant AttentionParams& params [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 memory[kAttentionSimdgroups * max_fragments(ValueTiles) * kSimdgroup];
  threadgroup float4 stats[kAttentionThreads];
  threadgroup uint finite[kAttentionSimdgroups];
  const AttentionPosition position = attention_position(thread_index, params);
  const Head head = head_of(group.x, params);
  if (head.sequence >= params.B) return;
  // With a causal mask the last queries have the most keys, so they run first.
  const uint all_rows = params.row_tiles * kAttentionRows;  // of a threadgroup
  const uint first = (params.row_threadgroups - 1 - group.x % params.row_threadgroups) * all_rows;
  const uint part = group.y % params.parts, column_threadgroup = group.y / params.parts;
  const SeenKeys keys = part_keys(first, first + all_rows, part, params);
  AttentionWork<T, KeyTiles> work;
  work.mask = mask;
  work.first_tile = column_threadgroup * params.column_parts * ValueTiles + position.column_part;
  const uint first_row = first + position.row_tile * kAttentionRows;
  find_work<wide>(work, q, k, v, head, first_row, keys, position, params);
  for (uint careful = 0; careful < 2; ++careful) {
    Attended<ValueTiles> attended;
    attend<wide>(attended, work, keys, careful, memory, position, params);
    if (store_sums(attended, memory, stats, finite, position)) break;
  }
  const ulong rows_before = ulong(group.x / params.row_threadgroups) * params.rows;
  store_rows<T, ValueTiles>(memory, stats, work.rows, work.first_tile, rows_before + first_row, part, sinks, output,
                            head, position, params);
}

}  // namespace moe_metal

// clang-format off
#define instantiate_attention(dtype, name, wide, keys, values) \
  instantiate_kernel("attention" name "_" #dtype, moe_metal::attention<dtype, wide, keys, values>)
#if in_part(wide64)
for_dtypes(instantiate_attention, "_64_wide", true, 2, 1)
#endif
#if in_part(wide128)
for_dtypes(instantiate_attention, "_128_wide", true, 4, 2)
#endif
#if in_part(any)
for_dtypes(instantiate_attention, "", false, 4, 2)
#endif
