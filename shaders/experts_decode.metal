// The op experts for few slots, in two dispatches that read each chosen expert's weights once:
//
//   gate_up   inner[slot] = act(gate_up[expert] * x[token] + gate_up_bias[expert])
//   down      output[token] = sum_k weights[k] * (down[expert_k] * inner[slot_k] + down_bias[expert_k])
//                             + sigmoid(shared_gate) * shared + residual
//
// x, shared, residual, output [T, H]; weights, ids [T, K], whose T * K entries are the slots; gate_up [E, 2I, H] and
// down [E, H, I] in any layout; biases [E, 2I] and [E, H]; inner [T * K, I]. inner is float: it is 1/H of the weights
// that are read, and the activated values may lie outside the range of half.
//
// _rows: lanes lie along the columns of a few rows, _columns: across the rows of a few columns, for transposed weights.
// _wide: a lane loads 16 bytes of weights at a time.
// Grid: slots (gate_up) or tokens (down) along x, blocks of rows along y. Slots lie along x so that those of one expert
// read the same rows at about the same time, from the cache. WeightParams.split simdgroups share the work on a row.
#include <metal_stdlib>
using namespace metal;

#include "experts.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ lanes along the columns

MOE_METAL_CONSTANT uint kInnerRows = kChunkRows / 2;  // a gate row and an up row each

// A chunk is what a simdgroup reads of a row at a time. load() gives a lane's share from its first column on.
template <typename T>
struct WideChunk {
  enum : uint { vectors = Wide<T>::vectors, step = Wide<T>::elements, columns = 32 * step };
  template <typename V>
  static void load(device const V* row, uint column, uint, long, thread Vectors<vectors>& values) {
    load_wide(row + column, values);
  }
};
template <typename T>
struct AnyChunk {
  enum : uint { vectors = 1, step = 1, columns = 128 };
  template <typename V>
  static void load(device const V* row, uint column, uint length, long stride, thread Vectors<vectors>& values) {
    for (uint n = 0; n < 4; ++n) {
      const uint c = column + 32 * n;
      values.at[0][n] = c < length ? float(row[c * stride]) : 0;
    }
  }
};

// The rows of weights of a simdgroup, and its sums for them.
struct ChunkRows {
  long offset[kChunkRows];
  float sum[kChunkRows];
};

// sum[r] += scale * (this lane's share of row r) * vector, over every split-th chunk from `chunk` on. One chunk at a
// time: two kept twice the registers, and were slower on the GPU where this was tried (H200).
template <typename Chunk, typename V, typename T>
void add_rows(thread ChunkRows& rows, float scale, device const V* vector, device const T* weights, long stride,
              uint length, uint chunk, uint split, uint lane) {
  for (uint column = chunk * Chunk::columns + lane * Chunk::step; column < length; column += split * Chunk::columns) {
    Vectors<Chunk::vectors> v, w[kChunkRows];
    Chunk::load(vector, column, length, 1, v);
    for (uint r = 0; r < kChunkRows; ++r) Chunk::load(weights + rows.offset[r], column, length, stride, w[r]);
    for (uint r = 0; r < kChunkRows; ++r) {
      float sum = 0;
      for (uint n = 0; n < Chunk::vectors; ++n) sum += dot(w[r].at[n], v.at[n]);
      rows.sum[r] += scale * sum;
    }
  }
}

// shares[simdgroup][r] = the simdgroup's sum of row r
inline void share_sums(thread const ChunkRows& rows, threadgroup float* shares, uint thread_index) {
  for (uint r = 0; r < kChunkRows; ++r) {
    const float sum = simd_sum(rows.sum[r]);
    if (thread_index % 32 == 0) shares[thread_index / 32 * kChunkRows + r] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of row r over the simdgroups that shared it.
inline float shared_sum(threadgroup const float* shares, uint first, uint split, uint r) {
  float sum = 0;
  for (uint s = first; s < first + split; ++s) sum += shares[s * kChunkRows + r];
  return sum;
}

template <typename T, typename Chunk>
[[kernel]] void experts_gate_up_rows(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                     device const T* gate_up [[buffer(2)]], device const T* bias [[buffer(3)]],
                                     device float* inner [[buffer(4)]], constant ExpertsParams& params [[buffer(5)]],
                                     uint2 group [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kChunkSimdgroups * kChunkRows];
  const uint slot = group.x;
  if (slot >= params.T * params.K) return;
  const int expert = expert_of(ids, slot, params);
  if (expert < 0) return;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, split = params.gate_up.split;
  const uint block_rows = kChunkSimdgroups / split * kInnerRows, block = group.y * block_rows;
  const uint first = block + simdgroup / split * kInnerRows;
  ChunkRows rows = {};
  for (uint r = 0; r < kChunkRows; ++r) {  // gate, up, gate, up; past the last row, the last again
    rows.offset[r] = long(min(first + r / 2, params.I - 1)) * params.gate_up.row + (r % 2) * params.gate_up.up;
  }
  device const T* vector = x + ulong(slot / params.K) * params.H;
  device const T* weights = gate_up + expert * params.gate_up.expert;
  if (first < params.I) {
    add_rows<Chunk>(rows, 1, vector, weights, params.gate_up.column, params.H, simdgroup % split, split, lane);
  }
  share_sums(rows, shares, thread_index);
  if (thread_index >= block_rows || block + thread_index >= params.I) return;
  const uint from = thread_index / kInnerRows * split, r = thread_index % kInnerRows * 2;
  inner[ulong(slot) * params.I + block + thread_index] =
      inner_value(shared_sum(shares, from, split, r), shared_sum(shares, from, split, r + 1), bias, expert,
                  block + thread_index, params);
}

// sum_k weights[k] * down_bias[expert_k], of one element
template <typename T>
float weighted_bias(device const T* bias, device const int* ids, device const T* weights, ulong token, uint h,
                    constant ExpertsParams& params) {
  float sum = 0;
  for (uint k = 0; k < params.K && params.down_bias != ParameterType::absent; ++k) {
    const ulong slot = token * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    sum += load(weights, slot, params.weights) * load(bias, ulong(expert) * params.H + h, params.down_bias);
  }
  return sum;
}

template <typename T, typename Chunk>
[[kernel]] void experts_down_rows(device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]],
                                  device const T* weights [[buffer(2)]], device const T* down [[buffer(3)]],
                                  device const T* bias [[buffer(4)]], device const T* shared [[buffer(5)]],
                                  device const T* shared_gate [[buffer(6)]], device const T* residual [[buffer(7)]],
                                  device T* output [[buffer(8)]], constant ExpertsParams& params [[buffer(9)]],
                                  uint2 group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kChunkSimdgroups * kChunkRows];
  const uint token = group.x, lane = thread_index % 32, simdgroup = thread_index / 32, split = params.down.split;
  const uint block_rows = kChunkSimdgroups / split * kChunkRows, block = group.y * block_rows;
  const uint first = block + simdgroup / split * kChunkRows;
  if (token >= params.T) return;
  ChunkRows rows = {};
  for (uint r = 0; r < kChunkRows; ++r) rows.offset[r] = long(min(first + r, params.H - 1)) * params.down.row;
  // The chunks of all experts in turn: simdgroup s of the split takes every split-th of them, from s on.
  const uint chunks = (params.I + Chunk::columns - 1) / Chunk::columns, turn = split - chunks % split;
  uint chunk = simdgroup % split;
  for (uint k = 0; k < params.K && first < params.H; ++k) {
    const ulong slot = ulong(token) * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const float weight = load(weights, slot, params.weights);
    add_rows<Chunk>(rows, weight, inner + slot * params.I, down + expert * params.down.expert, params.down.column,
                    params.I, chunk, split, lane);
    chunk = (chunk + turn) % split;
  }
  share_sums(rows, shares, thread_index);
  const uint h = block + thread_index;
  if (thread_index >= block_rows || h >= params.H) return;
  const float total = shared_sum(shares, thread_index / kChunkRows * split, split, thread_index % kChunkRows) +
                      weighted_bias(bias, ids, weights, token, h, params);
  output[ulong(token) * params.H + h] = T(total + beside_experts(shared, shared_gate, residual, token, h, params));
}

// ------------------------------------------------------------------------------------------ lanes across the rows

MOE_METAL_CONSTANT uint kColumnsAhead = 4;  // columns whose loads are in flight together

// The rows of a tile that a lane owns, and their weights in a column. `lanes` lanes own all rows; the others of a
// simdgroup do the same for other columns.
template <typename T, uint Rows>
struct WideColumn {
  enum : uint { rows = Rows, vectors = Wide<T>::vectors, lanes = Rows / Wide<T>::elements };
  device const T* first;
  long step;

  // Lanes past the last row do the first lane's work, and nobody asks for it.
  WideColumn(thread const RowTile<T>& tile, uint lane)
      : first(tile.at(tile.has(row(lane, 0)) ? row(lane, 0) : 0, 0)), step(tile.column) {}
  static uint row(uint lane, uint n) { return lane % lanes * Wide<T>::elements + n; }
  void load(uint column, thread Vectors<vectors>& values) const { load_wide(first + column * step, values); }
};
template <typename T, uint Rows>
struct AnyColumn {
  enum : uint { rows = Rows, vectors = Rows / 32, lanes = 8 };
  RowTile<T> tile;
  uint lane;

  AnyColumn(thread const RowTile<T>& tile, uint lane) : tile(tile), lane(lane) {}
  static uint row(uint lane, uint n) { return lane % lanes + lanes * n; }
  void load(uint column, thread Vectors<vectors>& values) const {
    for (uint n = 0; n < 4 * vectors; ++n) {
      values.at[n / 4][n % 4] = tile.has(row(lane, n)) ? float(*tile.at(row(lane, n), column)) : 0;
    }
  }
};

template <typename T>
using WideGateUp = WideColumn<T, kTileRows>;
template <typename T>
using AnyGateUp = AnyColumn<T, kTileRows>;
template <typename T>
using WideDown = WideColumn<T, kDownColumnRows>;
template <typename T>
using AnyDown = AnyColumn<T, kDownColumnRows>;

// sums += scale * (the lane's rows) * vector, over the lane's columns: every `streams`-th from `column` on.
template <typename Column, typename V>
void add_columns(thread Vectors<Column::vectors>& sums, float scale, device const V* vector,
                 thread const Column& weights, uint length, uint streams, uint column) {
  for (; column + (kColumnsAhead - 1) * streams < length; column += kColumnsAhead * streams) {
    Vectors<Column::vectors> w[kColumnsAhead];
    float v[kColumnsAhead];
    for (uint a = 0; a < kColumnsAhead; ++a) {
      weights.load(column + a * streams, w[a]);
      v[a] = scale * float(vector[column + a * streams]);
    }
    for (uint a = 0; a < kColumnsAhead; ++a) {
      for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += v[a] * w[a].at[n];
    }
  }
  for (; column < length; column += streams) {
    Vectors<Column::vectors> w;
    weights.load(column, w);
    for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += scale * float(vector[column]) * w.at[n];
  }
}

// Sums over the lanes and the simdgroups that did other columns, in a fixed order. They end up in shares.
template <typename Column>
void sum_shares(thread Vectors<Column::vectors>& sums, threadgroup float* shares, uint thread_index, uint split) {
  for (uint n = 0; n < Column::vectors; ++n) {
    for (ushort other = 16; other >= Column::lanes; other /= 2) sums.at[n] += simd_shuffle_xor(sums.at[n], other);
  }
  const uint lane = thread_index % 32;
  if (lane < Column::lanes) {
    threadgroup float* share = shares + thread_index / 32 * Column::rows;
    for (uint n = 0; n < 4 * Column::vectors; ++n) share[Column::row(lane, n)] = sums.at[n / 4][n % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < Column::rows) {
    for (uint s = 1; s < split; ++s) shares[thread_index] += shares[s * Column::rows + thread_index];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <typename T, typename Column>
[[kernel]] void experts_gate_up_columns(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                        device const T* gate_up [[buffer(2)]], device const T* bias [[buffer(3)]],
                                        device float* inner [[buffer(4)]], constant ExpertsParams& params [[buffer(5)]],
                                        uint2 group [[threadgroup_position_in_grid]],
                                        uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kMaxSplit * Column::rows];
  const uint slot = group.x;
  if (slot >= params.T * params.K) return;
  const int expert = expert_of(ids, slot, params);
  if (expert < 0) return;
  const RowTile<T> tile = gate_up_tile(gate_up, expert, group.y, params);
  const uint split = params.gate_up.split, streams = 32 / Column::lanes * split;
  Vectors<Column::vectors> sums = {};
  const Column weights(tile, thread_index);
  add_columns(sums, 1, x + ulong(slot / params.K) * params.H, weights, params.H, streams, thread_index / Column::lanes);
  sum_shares<Column>(sums, shares, thread_index, split);
  const uint row = group.y * kTileInner + thread_index;
  if (thread_index >= kTileInner || row >= params.I) return;
  inner[ulong(slot) * params.I + row] = inner_value(shares, thread_index, bias, expert, group.y, params);
}

template <typename T, typename Column>
[[kernel]] void experts_down_columns(device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]],
                                     device const T* weights [[buffer(2)]], device const T* down [[buffer(3)]],
                                     device const T* bias [[buffer(4)]], device const T* shared [[buffer(5)]],
                                     device const T* shared_gate [[buffer(6)]], device const T* residual [[buffer(7)]],
                                     device T* output [[buffer(8)]], constant ExpertsParams& params [[buffer(9)]],
                                     uint2 group [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kMaxSplit * Column::rows];
  const uint token = group.x, split = params.down.split, streams = 32 / Column::lanes * split;
  if (token >= params.T) return;
  Vectors<Column::vectors> sums = {};
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = ulong(token) * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const RowTile<T> tile = down_tile(down, expert, group.y * Column::rows, params);
    const Column columns(tile, thread_index);
    add_columns(sums, load(weights, slot, params.weights), inner + slot * params.I, columns, params.I, streams,
                thread_index / Column::lanes);
  }
  sum_shares<Column>(sums, shares, thread_index, split);
  const uint h = group.y * Column::rows + thread_index;
  if (thread_index >= Column::rows || h >= params.H) return;
  const float total = shares[thread_index] + weighted_bias(bias, ids, weights, token, h, params);
  output[ulong(token) * params.H + h] = T(total + beside_experts(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#define instantiate_walk(function, dtype, wide, any)                              \
  instantiate_kernel(#function "_wide_" #dtype, moe_metal::function<dtype, wide>) \
  instantiate_kernel(#function "_" #dtype, moe_metal::function<dtype, any>)
#define instantiate_decode(dtype)                                                                                  \
  instantiate_walk(experts_gate_up_rows, dtype, moe_metal::WideChunk<dtype>, moe_metal::AnyChunk<dtype>)           \
  instantiate_walk(experts_down_rows, dtype, moe_metal::WideChunk<dtype>, moe_metal::AnyChunk<dtype>)              \
  instantiate_walk(experts_gate_up_columns, dtype, moe_metal::WideGateUp<dtype>, moe_metal::AnyGateUp<dtype>)      \
  instantiate_walk(experts_down_columns, dtype, moe_metal::WideDown<dtype>, moe_metal::AnyDown<dtype>)

instantiate_decode(float)
instantiate_decode(half)
instantiate_decode(bfloat)
