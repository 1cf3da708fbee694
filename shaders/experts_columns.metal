// The op experts for few slots, with transposed dense weights; experts_decode.metal describes the tensors and the grid.
#include <metal_stdlib>
using namespace metal;

#include "experts_decode.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kColumnsAhead = 4;  // columns whose loads are in flight together

// The rows of a tile that belong to a lane, and their weights in a column. `lanes` lanes have all rows; the other lanes
// of a simdgroup have the same rows of other columns.
template <typename T, uint Rows>
struct WideColumn {
  enum : uint { rows = Rows, vectors = Wide<T>::vectors, lanes = Rows / Wide<T>::elements };
  device const T* first;
  long step;

  // Lanes past the last row repeat the work of the first lane; their results are not used.
  WideColumn(Weights<T> weights, constant WeightParams& params, thread const RowTile& tile, uint lane)
      : first(element(weights, params, tile, tile.has(row(lane, 0)) ? row(lane, 0) : 0, 0)), step(params.column) {}
  static uint row(uint lane, uint n) { return lane % lanes * Wide<T>::elements + n; }
  void load(uint column, thread Vectors<vectors>& values) const thread { load_wide(first + column * step, values); }
};
template <typename T, uint Rows>
struct AnyColumn {
  enum : uint { rows = Rows, vectors = Rows / 32, lanes = 8 };
  device const T* first;
  long row_step, column_step;
  RowTile tile;
  uint lane;

  AnyColumn(Weights<T> weights, constant WeightParams& params, thread const RowTile& tile, uint lane)
      : first(weights.data), row_step(params.row), column_step(params.column), tile(tile), lane(lane) {}
  static uint row(uint lane, uint n) { return lane % lanes + lanes * n; }
  void load(uint column, thread Vectors<vectors>& values) const thread {
    for (uint n = 0; n < 4 * vectors; ++n) {
      const uint j = row(lane, n);
      values.at[n / 4][n % 4] = tile.has(j) ? float(first[tile.number(j) * row_step + column * column_step]) : 0;
    }
  }
};

template <typename T>
using WideGateUp = WideColumn<T, kColumnRows>;
template <typename T>
using AnyGateUp = AnyColumn<T, kColumnRows>;
template <typename T>
using WideDown = WideColumn<T, kDownColumnRows>;
template <typename T>
using AnyDown = AnyColumn<T, kDownColumnRows>;

// sums += scale * (the lane's rows) * vector, over the lane's part of the columns: every parts-th column from `column`
// on.
template <typename Column, typename V>
void add_columns(thread Vectors<Column::vectors>& sums, float scale, device const V* vector,
                 thread const Column& weights, uint length, uint parts, uint column) {
  for (; column + (kColumnsAhead - 1) * parts < length; column += kColumnsAhead * parts) {
    Vectors<Column::vectors> w[kColumnsAhead];
    float v[kColumnsAhead];
    for (uint a = 0; a < kColumnsAhead; ++a) {
      weights.load(column + a * parts, w[a]);
      v[a] = scale * float(vector[column + a * parts]);
    }
    for (uint a = 0; a < kColumnsAhead; ++a) {
      for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += v[a] * w[a].at[n];
    }
  }
  for (; column < length; column += parts) {
    Vectors<Column::vectors> w;
    weights.load(column, w);
    for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += scale * float(vector[column]) * w.at[n];
  }
}

// Adds up the sums of the lanes and simdgroups with other columns, in a fixed order. The results are in `partial`.
template <typename Column>
void sum_over_parts(thread Vectors<Column::vectors>& sums, threadgroup float* partial, uint thread_index, uint parts) {
  for (uint n = 0; n < Column::vectors; ++n) {
    for (ushort other = 16; other >= Column::lanes; other /= 2) sums.at[n] += simd_shuffle_xor(sums.at[n], other);
  }
  const uint lane = thread_index % 32;
  if (lane < Column::lanes) {
    threadgroup float* own = partial + thread_index / 32 * Column::rows;
    for (uint n = 0; n < 4 * Column::vectors; ++n) own[Column::row(lane, n)] = sums.at[n / 4][n % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < Column::rows) {
    for (uint s = 1; s < parts; ++s) partial[thread_index] += partial[s * Column::rows + thread_index];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <typename T, typename Column>
[[kernel]] void experts_gate_up_columns(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                        device const T* gate_up [[buffer(2)]], device const uchar* scale [[buffer(3)]],
                                        device const uchar* offset [[buffer(4)]], device const T* bias [[buffer(5)]],
                                        device float* inner [[buffer(6)]], constant ExpertsParams& params [[buffer(7)]],
                                        uint2 group [[threadgroup_position_in_grid]],
                                        uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kColumnSimdgroups * Column::rows];
  const uint slot = group.x;
  if (slot >= params.T * params.K) return;
  const int expert = expert_of(ids, slot, params);
  if (expert < 0) return;
  const uint parts = params.gate_up.parts, column_parts = 32 / Column::lanes * parts;
  Vectors<Column::vectors> sums = {};
  const RowTile tile = gate_up_tile(group.y, params);
  const Column weights(of_expert(gate_up, scale, offset, expert, params.gate_up), params.gate_up, tile, thread_index);
  add_columns(sums, 1, x + ulong(slot / params.K) * params.H, weights, params.H, column_parts,
              thread_index / Column::lanes);
  sum_over_parts<Column>(sums, partial, thread_index, parts);
  const uint row = group.y * kColumnInner + thread_index;
  if (thread_index >= kColumnInner || row >= params.I) return;
  inner[inner_at(slot, row, params)] = inner_value(partial, thread_index, bias, expert, group.y, params);
}

template <typename T, typename Column>
[[kernel]] void experts_down_columns(device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]],
                                     device const T* weights [[buffer(2)]], device const T* down [[buffer(3)]],
                                     device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                     device const T* bias [[buffer(6)]], device const T* shared [[buffer(7)]],
                                     device const T* shared_gate [[buffer(8)]], device const T* residual [[buffer(9)]],
                                     device T* output [[buffer(10)]], constant ExpertsParams& params [[buffer(11)]],
                                     uint2 group [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kColumnSimdgroups * Column::rows];
  const uint token = group.x, parts = params.down.parts, column_parts = 32 / Column::lanes * parts;
  if (token >= params.T) return;
  const RowTile tile = plain_tile(group.y * Column::rows, params.H);
  Vectors<Column::vectors> sums = {};
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = ulong(token) * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const Column columns(of_expert(down, scale, offset, expert, params.down), params.down, tile, thread_index);
    add_columns(sums, load(weights, slot, params.weights), inner + slot * params.inner_length, columns, params.I,
                column_parts, thread_index / Column::lanes);
  }
  sum_over_parts<Column>(sums, partial, thread_index, parts);
  const uint h = group.y * Column::rows + thread_index;
  if (thread_index >= Column::rows || h >= params.H) return;
  const float total = partial[thread_index] + weighted_bias(bias, ids, weights, token, h, params);
  output[ulong(token) * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#define instantiate_columns(dtype, suffix, Read)                         \
  instantiate_kernel("experts_gate_up_columns" suffix "_" #dtype,        \
                     moe_metal::experts_gate_up_columns<dtype, moe_metal::Read##GateUp<dtype>>) \
  instantiate_kernel("experts_down_columns" suffix "_" #dtype,           \
                     moe_metal::experts_down_columns<dtype, moe_metal::Read##Down<dtype>>)
#if in_part(columns_wide) && !defined(MOE_METAL_FORMAT)
for_dtypes(instantiate_columns, "_wide", Wide)
#endif
#if in_part(columns) && !defined(MOE_METAL_FORMAT)
for_dtypes(instantiate_columns, "", Any)
#endif
