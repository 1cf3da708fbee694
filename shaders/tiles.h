// Tiles of rows of a matrix times 64 rows of weights, for many tokens.
//
// Operands are staged as float: that holds every half, bfloat and packed value, the experts' inner values are float, no
// half overflows, M1 and M2 have no bfloat arithmetic, and simdgroup_matrix multiplies float about as fast as half on
// the GPUs before M5.
#pragma once
#include "row_tile.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kDepth = 32;           // columns staged at a time
MOE_METAL_CONSTANT uint kStride = kDepth + 4;  // of a staged row: 4 more keep lanes off each other's banks
MOE_METAL_CONSTANT uint kProductStride = kTileRows + 4;
MOE_METAL_CONSTANT uint kNoRow = 0xffffffff;

// Threads share `count` pieces. The number of turns is a constant, so that loops unroll and their loads overlap.
constexpr uint turns(uint count) { return (count + kTileThreads - 1) / kTileThreads; }

// memory[j][c] = element (rows[j], column + c) of a matrix with rows of `length`; 0 where there is none.
template <uint TileSlots, typename A>
void stage_slots(threadgroup float* memory, device const A* matrix, threadgroup const uint* rows, bool wide,
                 uint length, uint column, uint thread_index) {
  constexpr uint loads = kDepth / Wide<A>::elements, count = TileSlots * loads;
  for (uint turn = 0; wide && turn < turns(count); ++turn) {
    const uint i = turn * kTileThreads + thread_index, j = i / loads, c = i % loads * Wide<A>::elements;
    if (count % kTileThreads != 0 && i >= count) break;
    typename Wide<A>::Values values = {};
    if (rows[j] != kNoRow && column + c < length) load_wide(matrix + ulong(rows[j]) * length + column + c, values);
    for (uint n = 0; n < Wide<A>::vectors; ++n) {
      reinterpret_cast<threadgroup float4*>(memory + j * kStride + c)[n] = values.at[n];
    }
  }
  for (uint i = thread_index; !wide && i < TileSlots * kDepth; i += kTileThreads) {
    const uint j = i / kDepth, c = i % kDepth;
    const bool inside = rows[j] != kNoRow && column + c < length;
    memory[j * kStride + c] = inside ? float(matrix[ulong(rows[j]) * length + column + c]) : 0;
  }
}

// How a format's weights are staged: memory[j][c] = element (j, column + c) of the tile's rows; 0 where there is none.
//
// Dense: neighbouring threads load neighbours.
template <typename T>
struct DenseTile {
  using Data = T;
  static void stage(threadgroup float* memory, Weights<T> weights, constant WeightParams& params,
                    thread const RowTile& rows, uint length, uint column, uint thread_index);
};
template <typename T>
void DenseTile<T>::stage(threadgroup float* memory, Weights<T> weights, constant WeightParams& params,
                         thread const RowTile& rows, uint length, uint column, uint thread_index) {
  const WeightLayout layout = params.layout;
  constexpr uint elements = Wide<T>::elements, along = kDepth / elements, across = kTileRows / elements;
  const bool wide = layout == WeightLayout::rows_wide || layout == WeightLayout::columns_wide;
  const bool by_rows = layout == WeightLayout::rows_wide || layout == WeightLayout::rows;
  for (uint turn = 0; wide && turn < turns(kTileRows * along); ++turn) {
    const uint i = turn * kTileThreads + thread_index;
    const uint j = by_rows ? i / along : i % across * elements, c = by_rows ? i % along * elements : i / across;
    typename Wide<T>::Values values = {};
    if (rows.has(j) && column + c < length) load_wide(element(weights, params, rows, j, column + c), values);
    for (uint n = 0; n < Wide<T>::vectors; ++n) {
      if (by_rows) {
        reinterpret_cast<threadgroup float4*>(memory + j * kStride + c)[n] = values.at[n];
        continue;
      }
      for (uint m = 0; m < 4; ++m) memory[(j + 4 * n + m) * kStride + c] = values.at[n][m];
    }
  }
  for (uint i = thread_index; !wide && i < kTileRows * kDepth; i += kTileThreads) {
    const uint j = by_rows ? i / kDepth : i % kTileRows, c = by_rows ? i % kDepth : i / kTileRows;
    const bool inside = rows.has(j) && column + c < length;
    memory[j * kStride + c] = inside ? float(*element(weights, params, rows, j, column + c)) : 0;
  }
}

// Packed: a thread has kNarrowColumns of one row, and its neighbour the row's next, so groups may end anywhere.
template <typename Codes>
struct PackedTile {
  using Data = uchar;
  static void stage(threadgroup float* memory, Weights<uchar> weights, constant WeightParams& params,
                    thread const RowTile& rows, uint length, uint column, uint thread_index) {
    constexpr uint along = kDepth / kNarrowColumns;
    static_assert(kTileRows * along == kTileThreads, "each thread stages one piece");
    const uint j = thread_index / along, c = thread_index % along * kNarrowColumns;
    Vectors<kNarrowColumns / 4> values;
    packed_values<Codes>(weights, params, rows.number(j), column + c, rows.has(j) ? length : 0, values);
    for (uint n = 0; n < kNarrowColumns / 4; ++n) {
      reinterpret_cast<threadgroup float4*>(memory + j * kStride + c)[n] = values.at[n];
    }
  }
};

// The product of TileSlots rows of the matrix with 64 rows of weights, [TileSlots][kProductStride] in memory. Each of
// four simdgroups has 16 columns of it, or with 64 slots a quarter of 32 by 32.
template <uint TileSlots, typename WeightTile, typename A>
void multiply_tile(threadgroup float* memory, device const A* matrix, threadgroup const uint* rows, bool wide,
                   Weights<typename WeightTile::Data> weights, constant WeightParams& params,
                   thread const RowTile& weight_rows, uint length, uint thread_index) {
  constexpr uint across = TileSlots == 64 ? 2 : 4, down = 4 / across;   // simdgroups
  constexpr uint M = TileSlots / down / 8, N = kTileRows / across / 8;  // matrices of each
  const uint simdgroup = thread_index / 32;
  const uint row = simdgroup / across * M * 8, col = simdgroup % across * N * 8;
  threadgroup float* staged_weights = memory + TileSlots * kStride;
  // Matrices live in registers only where every index is a constant, hence the pragmas.
  simdgroup_float8x8 sums[M][N];
#pragma unroll
  for (uint i = 0; i < M * N; ++i) sums[i / N][i % N] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint column = 0; column < length; column += kDepth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_slots<TileSlots>(memory, matrix, rows, wide, length, column, thread_index);
    WeightTile::stage(staged_weights, weights, params, weight_rows, length, column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < kDepth; k += 8) {
      simdgroup_float8x8 a[M], b[N];
#pragma unroll
      for (uint m = 0; m < M; ++m) simdgroup_load(a[m], memory + (row + m * 8) * kStride + k, kStride);
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        simdgroup_load(b[n], staged_weights + (col + n * 8) * kStride + k, kStride, ulong2(0), true);
      }
#pragma unroll
      for (uint i = 0; i < M * N; ++i) {
        simdgroup_multiply_accumulate(sums[i / N][i % N], a[i / N], b[i % N], sums[i / N][i % N]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < M * N; ++i) {
    threadgroup float* at = memory + (row + i / N * 8) * kProductStride + col + i % N * 8;
    simdgroup_store(sums[i / N][i % N], at, kProductStride);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace moe_metal

#if MOE_METAL_FORMAT == 0
#define weights_tile(dtype) moe_metal::DenseTile<dtype>
#else
#define weights_tile(dtype) moe_metal::PackedTile<weights_codes>
#endif
