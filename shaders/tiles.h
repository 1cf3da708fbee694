// Many rows of a matrix (tokens or slots) times many rows of weights. A threadgroup has a tile of the matrix's rows,
// which it copies to threadgroup memory unchanged. Each of its simdgroups has different rows of weights, which go
// directly from device memory to the registers of the lanes that multiply them.
//
// Operands are converted to float when fragments are filled: float represents every half, bfloat and packed value, sums
// are float anyway, M1 and M2 have no bfloat arithmetic, and simdgroup matrices of float multiply about as fast as
// those of half on GPUs before M5.
//
// A product is weights * tile^T, in fragments of 8 x 8 (matrices.h). The order of summed columns is free if both
// factors use the same one. Each of the four lanes of a row of weights has a chunk of two times 8 columns:
//
//   A step has 8 fragments: 4 for each half h (0 or 1) of the lanes' chunks. With the reader's `lane` and `second`, the
//   columns of lane q (0 to 3) in half h begin at c = lane * q + second * h. In fragment i of a half, column 2 * q is
//   column c + i of the weights, and column 2 * q + 1 is column c + 4 + i.
//   So row r of the other factor is column lane * (r / 2) + second * h + 4 * (r % 2) + i of the tile. For all i these
//   are four neighbours, which take one load.
//
// For packed weights, a lane's 16 columns are neighbours, which take one load. Dense weights are loaded in halves, and
// the halves of all lanes are contiguous: 64 or 128 bytes, which are completely used. If a lane had 16 neighbours, each
// cache line would be needed again after the products of a half. The L1 cache of M1 and M2 (8 KB) is too small to keep
// it that long.
#pragma once
#include "matrices.h"
#include "rows.h"
#include "weights.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kChunk = kNarrowColumns;  // columns of a row that a lane has in a step
MOE_METAL_CONSTANT uint kDepth = 4 * kChunk;      // columns of a step

// A lane's sums: at[m][n] are for its n-th row of weights with rows 8 * m + column and 8 * m + column + 1 of the tile.
template <uint TileRows>
struct Products {
  enum : uint { down = TileRows / 8, across = tile_fragments(TileRows) };
  float2 at[down][across];
};

// The numbers of a lane's rows of weights.
template <uint N>
struct RowNumbers {
  uint at[N];
};

// ------------------------------------------------------------------------------------------ weights

// Readers of a format's weights:
//   Data, Row, Chunk   the element type of the buffer; a pointer to a row; the loaded columns of a lane
//   row                finds a row
//   load               loads the columns of a row from `column` on; `whole`: all of them are within the row
//   eight              elements i to i + 7 divided by `factor`; elements beyond the row's end are 0
//   wide               whether loads of 16 bytes are aligned, for the weights and for the matrix
//   lane, second       columns from a lane's first to the next lane's, and from its first 8 to its second 8
//   stride             of a staged row, chosen so that rows 2 apart use different banks

template <typename T>
struct WideTile {
  using Data = T;
  enum : uint { wide = 1, factor = 1, lane = 8, second = 32, stride = kDepth + 8, loads = 2 / Wide<T>::vectors };
  struct Row {
    device const T* at;
  };
  struct Chunk {
    device const T* row;
    uint column, length;
    uint4 first[loads];  // 8 elements; all 16 would take half of a thread's registers
  };
  static Row row(Weights<T> weights, constant WeightParams& params, uint number) {
    Row row;
    row.at = weights.data + row_offset(params, number);
    return row;
  }
  template <bool whole>
  static void load(Row row, constant WeightParams&, uint column, uint length, thread Chunk& chunk) {
    chunk.row = row.at;
    chunk.column = column;
    chunk.length = length;
    load_eight<whole>(chunk, column, chunk.first);
  }
  template <bool whole>
  static void eight(thread const Chunk& chunk, uint i, thread Vectors<2>& values) {
    if (i == 0) {
      to_floats<T>(chunk.first, values);
      return;
    }
    uint4 loaded[loads];
    load_eight<whole>(chunk, chunk.column + second, loaded);
    to_floats<T>(loaded, values);
  }
  // A load beyond the end is moved to the end: with a branch it would wait for the loads before it.
  template <bool whole>
  static void load_eight(thread const Chunk& chunk, uint column, thread uint4* loaded) {
    constexpr uint elements = Wide<T>::elements;
    for (uint n = 0; n < loads; ++n) {
      const uint c = column + n * elements;
      loaded[n] = *reinterpret_cast<device const uint4*>(chunk.row + (whole ? c : min(c, chunk.length - elements)));
      if (!whole && c >= chunk.length) loaded[n] = 0;
    }
  }
};

// Any strides and any length.
template <typename T>
struct AnyTile {
  using Data = T;
  enum : uint { wide = 0, factor = 1, lane = kChunk, second = 8, stride = kDepth + 4 };
  struct Row {
    device const T* at;
  };
  struct Chunk {
    device const T* at;  // the lane's first column
    long step;
    uint count;  // elements from there to the row's end
  };
  static Row row(Weights<T> weights, constant WeightParams& params, uint number) {
    Row row;
    row.at = weights.data + row_offset(params, number);
    return row;
  }
  template <bool whole>
  static void load(Row row, constant WeightParams& params, uint column, uint length, thread Chunk& chunk) {
    chunk.count = column < length ? length - column : 0;
    chunk.at = row.at + min(column, length - 1) * params.column;
    chunk.step = params.column;
  }
  template <bool whole>
  static void eight(thread const Chunk& chunk, uint i, thread Vectors<2>& values) {
    for (uint n = 0; n < 8; ++n) {
      const bool inside = whole || i + n < chunk.count;
      const float value = float(chunk.at[inside ? (i + n) * chunk.step : 0]);
      values.at[n / 4][n % 4] = inside ? value : 0;
    }
  }
};

template <typename Codes, bool is_wide>
struct PackedTile {
  using Data = uchar;
  using Row = PackedRow;
  using Chunk = LoadedChunk<Codes>;
  enum : uint { wide = is_wide, factor = Codes::factor, lane = kChunk, second = 8, stride = kDepth + 4 };
  static Row row(Weights<uchar> weights, constant WeightParams& params, uint number) {
    return packed_row<Codes>(weights, params, number);
  }
  template <bool whole>
  static void load(Row row, constant WeightParams& params, uint column, uint length, thread Chunk& chunk) {
    const uint count = whole ? kChunk : column < length ? length - column : 0;
    load_chunk(row, params, column, count, is_wide || params.layout == WeightLayout::rows_wide, chunk);
    if (count == 0) return;
    spread_nan(chunk);
    chunk.offset *= 1 / float(factor);
  }
  template <bool>
  static void eight(thread const Chunk& chunk, uint i, thread Vectors<2>& values) {
    chunk_values<Codes, true>(chunk, i, values);
  }
};

// ------------------------------------------------------------------------------------------ the tile's rows

// What a thread stages of a tile in each step: `loads` times 16 bytes, from rows that are `between` apart.
template <uint TileRows, typename A>
struct Staged {
  enum : uint {
    elements = Wide<A>::elements,
    along = kDepth / elements,
    between = kTileThreads / along,
    loads = (TileRows + between - 1) / between
  };
  device const A* from[loads];
  uint4 loaded[loads];
};

// The number of rows with padding: rows of zeros complete the last fragment.
inline uint filled(uint count) { return (count + 7) / 8 * 8; }

template <uint TileRows, typename A>
void find_rows(thread Staged<TileRows, A>& staged, device const A* matrix, threadgroup const uint* rows, uint count,
               uint length, uint thread_index) {
  using S = Staged<TileRows, A>;
#pragma unroll
  for (uint t = 0; t < S::loads; ++t) {
    const uint j = min(thread_index / S::along + t * S::between, count - 1);
    staged.from[t] = matrix + ulong(rows[j]) * length;
    staged.loaded[t] = 0;
  }
}

// Loads to registers, together with the weights, before the barrier after which the rows are stored.
template <bool whole, uint TileRows, typename A>
void load_rows(thread Staged<TileRows, A>& staged, uint count, uint column, uint length, uint thread_index) {
  using S = Staged<TileRows, A>;
  const uint c = column + thread_index % S::along * S::elements;
#pragma unroll
  for (uint t = 0; t < S::loads; ++t) {
    if (thread_index / S::along + t * S::between >= count) continue;
    const uint at = whole ? c : min(c, length - S::elements);
    const uint4 bits = *reinterpret_cast<device const uint4*>(staged.from[t] + at);
    staged.loaded[t] = whole || c < length ? bits : uint4(0);
  }
}
template <uint stride, uint TileRows, typename A>
void store_rows(threadgroup A* memory, thread const Staged<TileRows, A>& staged, uint count, uint thread_index) {
  using S = Staged<TileRows, A>;
#pragma unroll
  for (uint t = 0; t < S::loads; ++t) {
    const uint j = thread_index / S::along + t * S::between;
    if (j >= filled(count)) continue;
    threadgroup A* to = memory + j * stride + thread_index % S::along * S::elements;
    if (stride * sizeof(A) % 16 == 0) {
      *reinterpret_cast<threadgroup uint4*>(to) = staged.loaded[t];
      continue;
    }
    reinterpret_cast<threadgroup uint2*>(to)[0] = staged.loaded[t].xy;  // rows are aligned to 8 bytes
    reinterpret_cast<threadgroup uint2*>(to)[1] = staged.loaded[t].zw;
  }
}

// The same element by element.
template <uint stride, uint TileRows, typename A>
void stage_any_rows(threadgroup A* memory, thread const Staged<TileRows, A>& staged, uint count, uint column,
                    uint length, uint thread_index) {
  using S = Staged<TileRows, A>;
  const uint first = thread_index % S::along * S::elements;
#pragma unroll
  for (uint t = 0; t < S::loads; ++t) {
    const uint j = thread_index / S::along + t * S::between;
    if (j >= filled(count)) continue;
    for (uint c = first; c < first + S::elements; ++c) {
      const bool inside = j < count && column + c < length;
      memory[j * stride + c] = inside ? staged.from[t][column + c] : A(0);
    }
  }
}

template <typename A>
float4 staged_four(threadgroup A* at) {
  const vec<A, 4> v = *reinterpret_cast<threadgroup vec<A, 4>*>(at);
  return float4(float(v.x), float(v.y), float(v.z), float(v.w));
}

// ------------------------------------------------------------------------------------------ the product

// products += weights * tile, over a step's columns. Fragments without rows of the tile are skipped.
template <bool whole, typename Reader, uint TileRows, typename A>
void add_products(thread Products<TileRows>& products, threadgroup A* memory, uint count,
                  thread const typename Reader::Chunk* chunks, FragmentElement element) {
  using P = Products<TileRows>;
  constexpr uint stride = Reader::stride;
  threadgroup A* rows = memory + element.column * stride + element.row / 2 * Reader::lane + element.row % 2 * 4;
#pragma unroll
  for (uint h = 0; h < 2; ++h) {
    Vectors<2> weights[P::across];
#pragma unroll
    for (uint n = 0; n < P::across; ++n) Reader::template eight<whole>(chunks[n], 8 * h, weights[n]);
#pragma unroll
    for (uint m = 0; m < P::down; ++m) {
      if (8 * m >= count) continue;
      const float4 one = staged_four(rows + 8 * m * stride + h * Reader::second);
      const float4 next = staged_four(rows + (8 * m + 1) * stride + h * Reader::second);
#pragma unroll
      for (uint i = 0; i < 4; ++i) {
#pragma unroll
        for (uint n = 0; n < P::across; ++n) {
          multiply_add(products.at[m][n], float2(weights[n].at[0][i], weights[n].at[1][i]), float2(one[i], next[i]));
        }
      }
    }
  }
}

template <bool whole, typename Reader, uint TileRows, typename A>
void step(thread Products<TileRows>& products, thread Staged<TileRows, A>& staged, threadgroup A* memory, bool wide,
          uint count, thread const typename Reader::Row* weights, constant WeightParams& params, uint column,
          uint length, FragmentElement element, uint thread_index) {
  constexpr uint across = Products<TileRows>::across;
  typename Reader::Chunk chunks[across];
  if (wide) load_rows<whole>(staged, count, column, length, thread_index);
#pragma unroll
  for (uint n = 0; n < across; ++n) {
    Reader::template load<whole>(weights[n], params, column + element.column / 2 * Reader::lane, length, chunks[n]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (wide) {
    store_rows<Reader::stride>(memory, staged, count, thread_index);
  } else {
    stage_any_rows<Reader::stride>(memory, staged, count, column, length, thread_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  add_products<whole, Reader>(products, memory, count, chunks, element);
}

// The products of a lane's rows of weights with the rows of the tile, which are the `count` rows rows[j] of the matrix.
// `memory` has room for TileRows * Reader::stride elements of A. `wide`: loads of 16 bytes of the matrix are aligned.
template <uint TileRows, typename Reader, typename A>
void multiply_tile(thread Products<TileRows>& products, threadgroup uint4* memory, device const A* matrix,
                   threadgroup const uint* rows, uint count, bool wide, Weights<typename Reader::Data> weights,
                   constant WeightParams& params, thread const RowNumbers<tile_fragments(TileRows)>& numbers,
                   uint length, uint thread_index) {
  constexpr uint across = Products<TileRows>::across;
  const FragmentElement element = fragment_element(thread_index % 32);
  threadgroup A* tile = reinterpret_cast<threadgroup A*>(memory);
  Staged<TileRows, A> staged;
  find_rows(staged, matrix, rows, count, length, thread_index);
  wide = Reader::wide || wide;  // a compile-time constant if the reader is wide
  typename Reader::Row weight_rows[across];
#pragma unroll
  for (uint n = 0; n < across; ++n) weight_rows[n] = Reader::row(weights, params, numbers.at[n]);
#pragma unroll
  for (uint i = 0; i < products.down * across; ++i) products.at[i / across][i % across] = 0;
  uint column = 0;
  for (; column + kDepth <= length; column += kDepth) {
    step<true, Reader>(products, staged, tile, wide, count, weight_rows, params, column, length, element, thread_index);
  }
  if (column < length) {
    step<false, Reader>(products, staged, tile, wide, count, weight_rows, params, column, length, element,
                        thread_index);
  }
  if (Reader::factor == 1) return;
#pragma unroll
  for (uint i = 0; i < products.down * across; ++i) products.at[i / across][i % across] *= float(Reader::factor);
}

// ------------------------------------------------------------------------------------------ a lane's rows

// The first of a lane's rows, which are consecutive, among the `count` rows of its threadgroup.
template <uint count>
uint first_of_lane(uint thread_index) {
  constexpr uint of_simdgroup = count / kTileSimdgroups;
  return thread_index / 32 * of_simdgroup + fragment_element(thread_index % 32).row * (of_simdgroup / 8);
}

// Loads the biases of rows, or 0.
template <uint N, typename T>
void load_biases(device const T* bias, ulong first, thread const RowNumbers<N>& numbers, ParameterType type,
                 thread Floats<N>& biases) {
  for (uint n = 0; n < N; ++n) {
    biases.at[n] = type == ParameterType::absent ? 0 : load(bias, first + numbers.at[n], type);
  }
}

}  // namespace moe_metal

// The readers for a library's format: for aligned loads, and for any weights.
#ifndef MOE_METAL_FORMAT
#define wide_tile(dtype) moe_metal::WideTile<dtype>
#define any_tile(dtype) moe_metal::AnyTile<dtype>
#else
#define wide_tile(dtype) moe_metal::PackedTile<weights_codes(kNarrowColumns), true>
#define any_tile(dtype) moe_metal::PackedTile<weights_codes(kNarrowColumns), false>
#endif
