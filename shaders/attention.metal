// The op attention: output = softmax(scores) * v, where scores = softcap(scale * q * k) + mask, over the keys that each
// query sees.
//
// q [B, A, T, D], k [B, J, S, D], v [B, J, S, V] and mask [B, A, T, S] with any strides; sinks [A]; output
// [B, T, A, V]. The first kernel writes partial results for the second to one buffer: stats [B, J, rows, parts], then
// sums [B, J, rows, parts, V], with V rounded up to whole vectors.
//
// The queries of all heads that share a key head are the rows of one matrix: row r is query r / (A / J) of head
// r % (A / J) among them. A simdgroup has 8 rows and a range of keys, which it loads block by block, once for all rows,
// with an online softmax: scores are only in registers. Products are transposed, scores^T = k * q^T and output^T = v^T
// * weights^T; a lane has two rows of q. So the weights are in the lanes where the second product needs them, and a
// row's scale factor is known to the lanes that have its sums.
//
// Columns may be assigned to matrices freely, as long as both factors agree. In a chunk of 32 columns of a key, each of
// the four lanes of the key has 8 neighbours, which take one or two loads; the i-th of 4 matrices multiplies elements i
// and i + 4 of each lane. In a chunk of 64 columns of a value, each of the 8 lanes of two keys has 8 neighbours of
// both; the i-th of 8 matrices multiplies element i.
//
// attention: a threadgroup of kAttentionSimdgroups has `tiles` of 8 rows. In a tile, `slices` simdgroups share the
// columns of long keys and values; the remaining factor are streams, which have different blocks of keys. Grid:
// row_blocks of each sequence and key head along x; along y parts of the keys and, for values that are longer than a
// threadgroup can take, blocks of their columns, which compute the scores again.
// attention_combine: combines the parts of a row. Grid: rows of the output along x.
//
// A lane has few waits for memory: it loads 128 bytes at a time (of 16-bit numbers: 64 columns of 32 keys), and the
// first values of a block before the softmax of its scores. That takes 32 registers, and q and the sums
// of its rows as many each.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "matrices.h"
#include "rows.h"
#include "weights.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kKeyMatrices = kAttentionKeys / 8;

// The position of a simdgroup and its lane in the work.
struct AttentionPlace {
  uint simdgroup, lane, slice, tile, stream, streams;
  MatrixPlace matrix;
};
inline AttentionPlace attention_place(uint thread_index, constant AttentionParams& params) {
  AttentionPlace place;
  place.simdgroup = thread_index / kSimdgroup;
  place.lane = thread_index % kSimdgroup;
  // These are powers of two; divisions take long.
  const uint slices = ctz(params.slices), tiles = ctz(params.tiles);
  place.slice = place.simdgroup & (params.slices - 1);
  place.tile = place.simdgroup >> slices & (params.tiles - 1);
  place.stream = place.simdgroup >> (slices + tiles);
  place.streams = kAttentionSimdgroups >> (slices + tiles);
  place.matrix = matrix_place(place.lane);
  return place;
}

// The number of matrices of a simdgroup in threadgroup memory: twice its scores, or its sums.
constexpr uint max_matrices(uint value_chunks) {
  return 2 * kKeyMatrices > 8 * value_chunks ? 2 * kKeyMatrices : 8 * value_chunks;
}

// ------------------------------------------------------------------------------------------ what a row sees

struct SeenKeys {
  uint first, end;
};
inline SeenKeys seen_keys(uint query, constant AttentionParams& params) {
  const int past = int(params.S) - int(params.T) + int(query) + 1;
  SeenKeys keys;
  keys.first = params.window ? uint(max(past - int(params.window), 0)) : 0;
  keys.end = params.causal ? uint(max(past, 0)) : params.S;
  return keys;
}

struct Head {
  ulong sequence, key_head;
};
inline Head head_of(uint group, constant AttentionParams& params) {
  const uint head = group / params.row_blocks;
  Head found;
  found.sequence = head / params.J;
  found.key_head = head % params.J;
  return found;
}

// One of a lane's two rows.
struct AttentionRow {
  uint query, head;
  bool exists;
  SeenKeys keys;  // empty if the row does not exist
  ulong mask;     // the offset of its mask
};
inline AttentionRow attention_row(uint r, Head head, SeenKeys part, constant AttentionParams& params) {
  const uint heads = params.A / params.J, inside = min(r, params.rows - 1);
  AttentionRow row;
  row.query = inside / heads;
  row.head = uint(head.key_head) * heads + inside % heads;
  row.exists = r < params.rows;
  row.keys = seen_keys(row.query, params);
  row.keys.end = row.exists ? min(row.keys.end, part.end) : 0;
  row.mask = head.sequence * params.mask.sequence + row.head * params.mask.head + row.query * params.mask.row;
  return row;
}

// The keys of a part that any row in [first_row, end_row) sees.
inline SeenKeys part_keys(uint first_row, uint end_row, uint part, constant AttentionParams& params) {
  const uint heads = params.A / params.J, begin = params.first_key + part * params.part_keys;
  const uint last_row = min(end_row, params.rows) - 1;
  SeenKeys keys;
  keys.first = max(seen_keys(first_row / heads, params).first, begin);
  keys.end = min(seen_keys(last_row / heads, params).end, begin + params.part_keys);
  return keys;
}

// The score of a key after softcap and mask. It is and stays -inf if the row does not see the key.
template <typename T>
float masked(float score, uint key, AttentionRow row, device const uchar* mask, constant AttentionParams& params) {
  if (key < row.keys.first || key >= row.keys.end) return score;
  if (params.softcap != 0) score = params.softcap * precise::tanh(score / params.softcap);
  if (params.mask_type == MaskType::absent) return score;
  const ulong at = row.mask + key * params.mask.element;
  if (params.mask_type == MaskType::boolean) return mask[at] ? score : -INFINITY;
  const float added = params.mask_type == MaskType::float32 ? reinterpret_cast<device const float*>(mask)[at]
                                                            : float(reinterpret_cast<device const T*>(mask)[at]);
  return added == -INFINITY ? added : score + added;
}

// ------------------------------------------------------------------------------------------ loads

// Elements `column` to column + 7 of a row, or 0 beyond its end. Wide rows consist of whole aligned runs of 8 elements.
// They are converted only when they are needed, so that all loads are issued before the first one is waited for. Beyond
// the end their last run is loaded, and values_of makes it 0 if its mask is 0. A conditional would be turned into a
// branch around the load.
template <bool wide, typename T>
struct Run {
  uint4 bits[2 / Wide<T>::vectors];
};
template <typename T>
struct Run<false, T> {
  Vectors<2> values;
};
// How many of them a lane loads before it multiplies the first one, in 32 registers, and how many chunks of keys that
// is.
template <bool wide, typename T>
struct AtOnce {
  enum : uint { runs = wide ? 4 * Wide<T>::vectors : 4, chunks = runs / kKeyMatrices };
};
template <typename T>
void load_run(device const T* row, ulong, uint column, uint length, thread Run<true, T>& run) {
  device const uint4* from = reinterpret_cast<device const uint4*>(row + min(column, length - 8));
  for (uint n = 0; n < 2 / Wide<T>::vectors; ++n) run.bits[n] = from[n];
}
template <typename T>
void load_run(device const T* row, ulong stride, uint column, uint length, thread Run<false, T>& run) {
#pragma unroll
  for (uint n = 0; n < 8; ++n) {
    const bool inside = column + n < length;
    const float value = float(row[inside ? (column + n) * stride : 0]);
    run.values.at[n / 4][n % 4] = inside ? value : 0;
  }
}
template <typename T>
Vectors<2> values_of(thread const Run<true, T>& run, uint mask) {
  uint4 bits[2 / Wide<T>::vectors];
  for (uint n = 0; n < 2 / Wide<T>::vectors; ++n) bits[n] = run.bits[n] & mask;
  Vectors<2> values;
  to_floats<T>(bits, values);
  return values;
}
template <typename T>
Vectors<2> values_of(thread const Run<false, T>& run, uint) {
  return run.values;
}

// A lane's part of a chunk of q: for its two rows, the columns that correspond to the columns of keys.
struct QueryChunk {
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
void load_chunk(QueryRows<T> queries, uint chunk, MatrixPlace place, constant AttentionParams& params,
                thread QueryChunk& q) {
#pragma unroll
  for (uint e = 0; e < 2; ++e) {
    load_query<wide>(queries.row[e], chunk * kAttentionKeyColumns + 4 * place.row, params, q.row[e]);
  }
}

// ------------------------------------------------------------------------------------------ scores

// The scores of a block of keys, later their weights: at[n] are for key 8 n + row and the lane's two rows.
struct Scores {
  float2 at[kKeyMatrices];
};

// Adds the products of `Count` chunks of a block's keys, of which this slice has every params.slices-th, with those of
// q. All loads are issued before the first product.
template <bool wide, uint Count, typename T>
void add_chunks(thread Scores& scores, device const T* k, uint block, uint chunk, thread const QueryChunk* q,
                MatrixPlace place, constant AttentionParams& params) {
  Run<wide, T> runs[Count][kKeyMatrices];
#pragma unroll
  for (uint c = 0; c < Count; ++c) {
    const uint column = (chunk + c * params.slices) * kAttentionKeyColumns + 4 * place.column;
#pragma unroll
    for (uint n = 0; n < kKeyMatrices; ++n) {
      device const T* key = k + min(block + 8 * n + place.row, params.S - 1) * params.k.row;
      load_run(key, params.k.element, column, params.D, runs[c][n]);
    }
  }
#pragma unroll
  for (uint c = 0; c < Count; ++c) {
    const uint column = (chunk + c * params.slices) * kAttentionKeyColumns + 4 * place.column;
    const uint mask = column < params.D ? 0xffffffff : 0;
#pragma unroll
    for (uint n = 0; n < kKeyMatrices; ++n) {
      const Vectors<2> run = values_of(runs[c][n], mask);
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        multiply_add(scores.at[n], float2(run.at[0][i], run.at[1][i]), float2(q[c].row[0][i], q[c].row[1][i]));
      }
    }
  }
}

// Adds up the products of the slices, which have different columns. It is safe to write `shares` again two blocks
// later, because of the barrier between.
inline void sum_slices(thread Scores& scores, threadgroup float2* shares, AttentionPlace place, uint slices) {
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) {
    shares[(place.simdgroup * kKeyMatrices + n) * kSimdgroup + place.lane] = scores.at[n];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) {
    float2 sum = 0;
    for (uint s = place.simdgroup - place.slice; s < place.simdgroup - place.slice + slices; ++s) {
      sum += shares[(s * kKeyMatrices + n) * kSimdgroup + place.lane];
    }
    scores.at[n] = sum;
  }
}

// ------------------------------------------------------------------------------------------ the softmax

// A lane's state of its two rows: the highest score so far, the sum of the weights exp(score - highest) (until the end
// only of keys in the lane's row of matrices), and the sums of the weighted values.
template <uint ValueChunks>
struct Attended {
  float2 highest, total;
  float2 sums[8 * ValueChunks];
};

inline float2 higher(float2 a, float2 b) { return float2(b.x > a.x ? b.x : a.x, b.y > a.y ? b.y : a.y); }

// The value that is subtracted from scores: `highest`, or 0 if no key has been seen.
inline float2 offset_of(float2 highest) {
  return float2(highest.x == -INFINITY ? 0 : highest.x, highest.y == -INFINITY ? 0 : highest.y);
}

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

// Converts scores to weights, and scales the sums so far to the new highest score. -> which keys are seen: bit 2 n + e
// is for at[n][e]
template <typename T, uint ValueChunks>
uint weigh(thread Attended<ValueChunks>& attended, thread Scores& scores, uint block, thread const AttentionRow* rows,
           device const uchar* mask, MatrixPlace place, constant AttentionParams& params) {
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) {
    const uint key = block + 8 * n + place.row;
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      const bool is_seen = key >= rows[e].keys.first && key < rows[e].keys.end;
      scores.at[n][e] = is_seen ? scores.at[n][e] * params.scale : -INFINITY;
    }
  }
  if (params.softcap != 0 || params.mask_type != MaskType::absent) {
#pragma unroll
    for (uint n = 0; n < kKeyMatrices; ++n) {
      const uint key = block + 8 * n + place.row;
#pragma unroll
      for (uint e = 0; e < 2; ++e) scores.at[n][e] = masked<T>(scores.at[n][e], key, rows[e], mask, params);
    }
  }
  float2 highest = attended.highest;
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) highest = higher(highest, scores.at[n]);
  highest = highest_of_all(highest);
  const float2 offset = offset_of(highest), factor = exp(attended.highest - offset);
  attended.highest = highest;
  attended.total *= factor;
#pragma unroll
  for (uint i = 0; i < 8 * ValueChunks; ++i) attended.sums[i] *= factor;
  uint seen = 0;
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) {
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

// ------------------------------------------------------------------------------------------ values

// Loads a chunk of columns of a block's values, from matrix `first` on.
template <bool wide, typename T>
void load_values(device const T* v, uint block, uint first, uint column, MatrixPlace place,
                 constant AttentionParams& params, thread Run<wide, T>* runs) {
#pragma unroll
  for (uint n = 0; n < AtOnce<wide, T>::runs; ++n) {
    device const T* value = v + min(block + 8 * (first + n / 2) + place.column + n % 2, params.S - 1) * params.v.row;
    load_run(value, params.v.element, column, params.V, runs[n]);
  }
}
// sums += weights * values. Sums of columns beyond the end are not used.
template <bool wide, typename T>
void add_values(thread float2* sums, thread const Scores& weights, uint first, thread const Run<wide, T>* runs) {
#pragma unroll
  for (uint n = 0; n < AtOnce<wide, T>::runs; n += 2) {
    const Vectors<2> even = values_of(runs[n], 0xffffffff), odd = values_of(runs[n + 1], 0xffffffff);
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      multiply_add(sums[i], float2(even.at[i / 4][i % 4], odd.at[i / 4][i % 4]), weights.at[first + n / 2]);
    }
  }
}

// Adds a chunk of columns key by key, skipping keys that are not seen: their values times 0 may be NaN.
template <bool wide, typename T>
void add_seen_values(thread float2* sums, thread const Scores& weights, uint seen, device const T* v, uint block,
                     uint column, AttentionPlace place, constant AttentionParams& params) {
  for (uint key = 0; key < 8; ++key) {
    const ushort lane = (place.lane & 9) | key % 4 * 2 | key / 4 * 16;  // the lane with the key and this lane's rows
    const uint key_seen = simd_shuffle(seen, lane);
#pragma unroll
    for (uint n = 0; n < kKeyMatrices; ++n) {
      const float2 weight = simd_shuffle(weights.at[n], lane);
      Run<wide, T> loaded;
      load_run(v + min(block + 8 * n + key, params.S - 1) * params.v.row, params.v.element, column, params.V, loaded);
      const Vectors<2> run = values_of(loaded, 0xffffffff);
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) {
          if (key_seen >> (2 * n + e) & 1) sums[i][e] += weight[e] * run.at[i / 4][i % 4];
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ a run of keys

template <typename T, uint KeyChunks>
struct AttentionWork {
  device const T* k;
  device const T* v;
  device const uchar* mask;
  QueryRows<T> queries;
  AttentionRow rows[2];
  QueryChunk q[KeyChunks];  // the first chunks of this slice; others are loaded again for each block
  uint first_chunk;         // the first chunk of columns of v of this slice
};

template <bool wide, typename T, uint KeyChunks>
void score_block(thread Scores& scores, thread const AttentionWork<T, KeyChunks>& work, uint block,
                 AttentionPlace place, constant AttentionParams& params) {
#pragma unroll
  for (uint n = 0; n < kKeyMatrices; ++n) scores.at[n] = 0;
  const uint chunks = (params.D + kAttentionKeyColumns - 1) / kAttentionKeyColumns;
  constexpr uint at_once = AtOnce<wide, T>::chunks;
#pragma unroll
  for (uint c = 0; c < KeyChunks; c += at_once) {
    const uint chunk = place.slice + c * params.slices;
    if (chunk + (at_once - 1) * params.slices < chunks) {
      add_chunks<wide, at_once>(scores, work.k, block, chunk, work.q + c, place.matrix, params);
    } else if (chunk < chunks) {
      add_chunks<wide, 1>(scores, work.k, block, chunk, work.q + c, place.matrix, params);
    }
  }
  for (uint chunk = place.slice + KeyChunks * params.slices; chunk < chunks; chunk += params.slices) {
    QueryChunk q;
    load_chunk<wide>(work.queries, chunk, place.matrix, params, q);
    add_chunks<wide, 1>(scores, work.k, block, chunk, &q, place.matrix, params);
  }
}

template <bool wide, uint ValueChunks, typename T, uint KeyChunks>
void attend(thread Attended<ValueChunks>& attended, thread const AttentionWork<T, KeyChunks>& work, SeenKeys keys,
            bool careful, threadgroup float2* memory, AttentionPlace place, constant AttentionParams& params) {
  attended.highest = -INFINITY;
  attended.total = 0;
#pragma unroll
  for (uint i = 0; i < 8 * ValueChunks; ++i) attended.sums[i] = 0;
  const uint step = place.streams * kAttentionKeys;  // all streams take the same number of steps, because of barriers
  uint turn = 0;
  for (uint first = keys.first; first < keys.end; first += step) {
    const uint block = first + place.stream * kAttentionKeys;
    Scores scores;
    score_block<wide>(scores, work, block, place, params);
    // The block's first values, which are loaded during the softmax.
    const uint first_column = work.first_chunk * kAttentionValueColumns + 8 * place.matrix.row;
    Run<wide, T> runs[AtOnce<wide, T>::runs];
    load_values<wide>(work.v, block, 0, first_column, place.matrix, params, runs);
    if (params.slices > 1) sum_slices(scores, memory + turn, place, params.slices);
    turn = kAttentionSimdgroups * kKeyMatrices * kSimdgroup - turn;
    const uint seen = weigh<T>(attended, scores, block, work.rows, work.mask, place.matrix, params);
#pragma unroll
    for (uint c = 0; c < ValueChunks; ++c) {
      const uint chunk = work.first_chunk + c * params.slices;
      const uint column = chunk * kAttentionValueColumns + 8 * place.matrix.row;
      if (chunk * kAttentionValueColumns >= params.V) continue;
      if (careful) {
        add_seen_values<wide>(attended.sums + 8 * c, scores, seen, work.v, block, column, place, params);
        continue;
      }
#pragma unroll
      for (uint n = 0; n < kKeyMatrices; n += AtOnce<wide, T>::runs / 2) {
        if (c + n != 0) load_values<wide>(work.v, block, n, column, place.matrix, params, runs);
        add_values(attended.sums + 8 * c, scores, n, runs);
      }
    }
  }
  attended.total = sum_of_all(attended.total);
}

// Writes a simdgroup's results to threadgroup memory, for store_rows. -> whether all sums of the threadgroup are
// finite. If not, the reason may be a key that is not seen.
template <uint ValueChunks>
bool share(thread const Attended<ValueChunks>& attended, threadgroup float2* memory, threadgroup float4* stats,
           threadgroup uint* finite, AttentionPlace place) {
  float2 none = 0;
#pragma unroll
  for (uint i = 0; i < 8 * ValueChunks; ++i) none += attended.sums[i] * 0;
  const bool is_finite = simd_all(none.x == 0 && none.y == 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // until the slices have read their scores
  if (place.lane == 0) finite[place.simdgroup] = is_finite;
  stats[place.simdgroup * kSimdgroup + place.lane] = float4(attended.highest, attended.total);
#pragma unroll
  for (uint i = 0; i < 8 * ValueChunks; ++i) {
    memory[(place.simdgroup * 8 * ValueChunks + i) * kSimdgroup + place.lane] = attended.sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool all = true;
  for (uint s = 0; s < kAttentionSimdgroups; ++s) all = all && finite[s];
  return all;
}

// ------------------------------------------------------------------------------------------ results

// The factor of a row's sums, with the sink of its head: 0 if the row sees no key.
template <typename T>
float share_of(float highest, float total, uint head, device const T* sinks, constant AttentionParams& params) {
  if (total == 0) return 0;
  if (params.sinks == ParameterType::absent) return 1 / total;
  const float sink = load(sinks, head, params.sinks), most = sink > highest ? sink : highest;
  const float offset = offset_of(most).x, scale = exp(highest - offset);
  return scale / (total * scale + exp(sink - offset));
}

// The columns of a part's sums in memory: whole vectors.
inline uint part_columns(constant AttentionParams& params) {
  return (params.V + kVectorWidth - 1) / kVectorWidth * kVectorWidth;
}

// Adds up the results of the streams of a tile, in their order, and stores the results of its rows, or the partial
// results of one part, as floats. The streams take turns with groups of four columns.
template <typename T, uint ValueChunks>
void store_rows(threadgroup const float2* memory, threadgroup const float4* stats, thread const AttentionRow* rows,
                uint first_chunk, ulong first_row, uint part, device const T* sinks, device T* output, Head head,
                AttentionPlace place, constant AttentionParams& params) {
  const uint step = params.slices * params.tiles;
  const uint first = place.slice + place.tile * params.slices;
  float2 highest = -INFINITY;
  for (uint s = first; s < kAttentionSimdgroups; s += step) {
    highest = higher(highest, stats[s * kSimdgroup + place.lane].xy);
  }
  const float2 offset = offset_of(highest);
  device float* parts = reinterpret_cast<device float*>(output);
  RowShape shape;
  shape.length = params.V;
  shape.wide = params.V % kVectorWidth == 0;
  for (uint four = place.stream; four < 2 * ValueChunks; four += place.streams) {
    const uint chunk = first_chunk + four / 2 * params.slices;
    const uint column = chunk * kAttentionValueColumns + 8 * place.matrix.row + four % 2 * 4;
    if (column >= params.V) continue;
    float2 total = 0;
    float4 sums[2] = {float4(0), float4(0)};
    for (uint s = first; s < kAttentionSimdgroups; s += step) {
      const float4 other = stats[s * kSimdgroup + place.lane];
      const float2 factor = exp(other.xy - offset);
      total += other.zw * factor;
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
        const float2 sum = memory[((s * 2 * ValueChunks + four) * 4 + i) * kSimdgroup + place.lane] * factor;
        sums[0][i] += sum.x;
        sums[1][i] += sum.y;
      }
    }
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      if (!rows[e].exists) continue;
      if (params.parts == 1) {
        const ulong row = (head.sequence * params.T + rows[e].query) * params.A + rows[e].head;
        const float share = share_of(highest[e], total[e], rows[e].head, sinks, params);
        store4(output + row * params.V, column, sums[e] * share, shape);
        continue;
      }
      const ulong row = (first_row + place.matrix.column + e) * params.parts + part;
      store4_wide(parts + params.sums_at + row * part_columns(params) + column, sums[e]);
      if (column == 0) reinterpret_cast<device float2*>(parts)[row] = float2(highest[e], total[e]);
    }
  }
}

template <bool wide, typename T, uint KeyChunks>
void find_work(thread AttentionWork<T, KeyChunks>& work, device const T* q, device const T* k, device const T* v,
               Head head, uint first_row, SeenKeys keys, AttentionPlace place, constant AttentionParams& params) {
  work.k = k + head.sequence * params.k.sequence + head.key_head * params.k.head;
  work.v = v + head.sequence * params.v.sequence + head.key_head * params.v.head;
#pragma unroll
  for (uint e = 0; e < 2; ++e) {
    const AttentionRow row = attention_row(first_row + place.matrix.column + e, head, keys, params);
    work.rows[e] = row;
    work.queries.row[e] = q + head.sequence * params.q.sequence + row.head * params.q.head + row.query * params.q.row;
  }
#pragma unroll
  for (uint c = 0; c < KeyChunks; ++c) {
    load_chunk<wide>(work.queries, place.slice + c * params.slices, place.matrix, params, work.q[c]);
  }
}

template <typename T, bool wide, uint KeyChunks, uint ValueChunks>
[[kernel]] void attention(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
                          device const T* v [[buffer(2)]], device const uchar* mask [[buffer(3)]],
                          device const T* sinks [[buffer(4)]], device T* output [[buffer(5)]],
                          constant AttentionParams& params [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 memory[kAttentionSimdgroups * max_matrices(ValueChunks) * kSimdgroup];
  threadgroup float4 stream_stats[kAttentionThreads];
  threadgroup uint finite[kAttentionSimdgroups];
  const AttentionPlace place = attention_place(thread_index, params);
  const Head head = head_of(group.x, params);
  if (head.sequence >= params.B) return;
  // With a causal mask the last queries have the most keys, so they run first.
  const uint block_rows = params.tiles * kAttentionRows;
  const uint first = (params.row_blocks - 1 - group.x % params.row_blocks) * block_rows;
  const uint part = group.y % params.parts, column_block = group.y / params.parts;
  const SeenKeys keys = part_keys(first, first + block_rows, part, params);
  AttentionWork<T, KeyChunks> work;
  work.mask = mask;
  work.first_chunk = column_block * params.slices * ValueChunks + place.slice;
  const uint first_row = first + place.tile * kAttentionRows;
  find_work<wide>(work, q, k, v, head, first_row, keys, place, params);
  for (uint careful = 0; careful < 2; ++careful) {
    Attended<ValueChunks> attended;
    attend<wide>(attended, work, keys, careful, memory, place, params);
    if (share(attended, memory, stream_stats, finite, place)) break;
  }
  const ulong rows_before = ulong(group.x / params.row_blocks) * params.rows;
  store_rows<T, ValueChunks>(memory, stream_stats, work.rows, work.first_chunk, rows_before + first_row, part, sinks,
                             output, head, place, params);
}

// The simdgroups take turns with the parts; a lane has four columns, or several times four, and the stats of one part.
// The loads of kPartsAtOnce parts and their stats are issued before the first one is waited for.
template <typename T>
[[kernel]] void attention_combine(device const float* parts [[buffer(0)]], device const T* sinks [[buffer(1)]],
                                  device T* output [[buffer(2)]], constant AttentionParams& params [[buffer(3)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]],
                                  uint threads [[threads_per_threadgroup]]) {
  threadgroup float4 shares[kCombineThreads];
  threadgroup float2 share_stats[kCombineSimdgroups];
  const uint heads = params.A / params.J, head = group % params.A, query = group / params.A % params.T;
  const ulong sequence = group / params.A / params.T;
  if (sequence >= params.B) return;
  const ulong row = (sequence * params.J + head / heads) * params.rows + ulong(query) * heads + head % heads;
  device const float2* stats = reinterpret_cast<device const float2*>(parts) + row * params.parts;
  const uint columns = part_columns(params);
  device const float* sums = parts + params.sums_at + row * params.parts * columns;
  const uint lane = thread_index % kSimdgroup, simdgroup = thread_index / kSimdgroup, simdgroups = threads / kSimdgroup;
  RowShape shape;
  shape.length = params.V;
  shape.wide = params.V % kVectorWidth == 0;
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
        loaded[n] = load4_wide(sums + ulong(part + simdgroups * min(n, last)) * columns + inside);
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
    shares[thread_index] = sum;
    if (lane == 0) share_stats[simdgroup] = float2(highest, total);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup != 0) continue;
    const float2 share = share_stats[min(lane, simdgroups - 1)];
    highest = simd_max(share.x);
    const float factor = lane < simdgroups ? exp(share.x - offset_of(highest).x) : 0;
    total = simd_sum(share.y * factor);
    sum = 0;
    for (uint s = 0; s < simdgroups; ++s) sum += shares[s * kSimdgroup + lane] * simd_shuffle(factor, ushort(s));
    if (column < params.V) {
      store4(output + ulong(group) * params.V, column, sum * share_of(highest, total, head, sinks, params), shape);
    }
  }
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
#if in_part(combine)
instantiate_dtypes("attention_combine", attention_combine)
#endif
