// The chunk type of dots.h for packed weights.
#pragma once
#include "dots_rows.h"

namespace moe_metal {

// The base address of a row's chunk. A 32-bit offset is added to that of the chunk, in 32 bits, instead of to the
// pointer.
inline device const uchar* row_of(device const uchar* matrix, uint row, thread ChunkPosition& at) {
  at.byte += row;
  return matrix;
}
inline device const uchar* row_of(device const uchar* matrix, long row, thread ChunkPosition&) { return matrix + row; }

// A lane's chunks, one of each row.
template <uint N>
struct RowWords {
  Words<N> row[kDotRows];
};

// sums[r] = start + the dot product of a group's codes of row r with its elements of the vector.
template <typename Codes, bool centred, uint N, uint M>
void multiply_codes(thread const RowWords<N>& words, thread const Vectors<M>& x, uint group, float start,
                    thread Floats<kDotRows>& sums) {
  constexpr uint columns = 4 * M / Codes::groups;
#pragma unroll
  for (uint r = 0; r < kDotRows; ++r) sums.at[r] = start;
#pragma unroll
  for (uint i = group * columns; i < (group + 1) * columns; i += 8) {
#pragma unroll
    for (uint r = 0; r < kDotRows; ++r) {
      Vectors<2> codes;
      Codes::template eight<centred>(words.row[r], i, codes);
#pragma unroll
      for (uint n = 0; n < 8; ++n) {
        sums.at[r] = fma(codes.at[n / 4][n % 4], x.at[i / 4 + n / 4][n % 4], sums.at[r]);
      }
    }
  }
}

// The index of element i in inner, whose layout we choose, for packed weights: elements that the lanes of a tile load
// together, 4 of each lane's chunk, are contiguous. With contiguous chunks of 128 bytes instead, `down` was limited by
// the cache (NVIDIA H200).
inline uint packed_index(uint i) {
  const uint lane = i % kPackedStep / kPackedColumns, four = i % kPackedColumns / 4;
  return i / kPackedStep * kPackedStep + (four * kPackedLanes + lane) * 4 + i % 4;
}

MOE_METAL_CONSTANT float kPlain = 256;

// The scales, offsets or sums of each group of the rows' chunks.
template <uint groups>
struct GroupNumbers {
  Floats<kDotRows> of[groups];
};

// Wide chunks have kPackedColumns columns. They need rows of whole chunks, groups of a size that the reader supports or
// of at least kPackedColumns, aligned rows of weights and vectors, and matrices below 4 GB. Otherwise chunks have
// kNarrowColumns, which are in one group whatever its size. Codes are centred for float activations: offsets are
// usually near -middle * scale, so sums of plain codes are large and cancel with the offsets, with 2 to 3 times the
// error of summing values. With 16-bit activations that error does not matter, and skipping the subtraction is faster.
template <typename Codes, bool centred>
struct PackedChunk {
  using Data = uchar;
  using At = typename OffsetOf<Codes::columns == kPackedColumns>::Type;
  using Layout = typename Codes::Layout;
  enum : uint {
    lanes = kPackedLanes,
    columns = Codes::columns,  // of a chunk
    wide = columns == kPackedColumns,
    apart = columns,
    step = lanes * columns,
    scale_rows = Codes::scale_rows,
    per_lane = 1,
    words = Codes::words,
    groups = Codes::groups,
    off_zero = Codes::zero && !centred  // subtracts `zero` from sums instead of from each code
  };
  using Elements = Vectors<columns / 4>;  // of the vector, for a chunk
  using Numbers = GroupNumbers<groups>;

  // The column of element n, a multiple of 8, of the chunk at `column`.
  static uint column_of(uint column, uint n) {
    if (Codes::distance == kNarrowColumns) return column + n;
    constexpr uint distance = Codes::distance, between = distance / kNarrowColumns;
    const uint chunk = column / kPackedColumns;
    return chunk / between * (2 * distance) + chunk % between * kNarrowColumns + n / kNarrowColumns * distance +
           n % kNarrowColumns;
  }
  template <bool reordered, typename V>
  static void load_eight(device const V* vector, uint column, thread Vectors<2>& eight) {
    if (reordered) {
      eight.at[0] = load4_aligned(vector + packed_index(column));
      eight.at[1] = load4_aligned(vector + packed_index(column + 4));
    } else {
      load_wide(vector + column, eight);
    }
  }
  template <bool reordered, typename V>
  static void load(device const V* vector, uint column, uint length, thread Elements& x) {
#pragma unroll
    for (uint n = 0; n < columns; n += 8) {
      Vectors<2> eight;
      if (!wide) {
        for (uint m = 0; m < 8; ++m) {
          const uint c = column + n + m;
          eight.at[m / 4][m % 4] = c < length ? float(vector[reordered ? packed_index(c) : c]) : 0;
        }
      } else {
        load_eight<reordered>(vector, column_of(column, n), eight);
      }
      x.at[n / 4] = eight.at[0];
      x.at[n / 4 + 1] = eight.at[1];
    }
  }
  // The factor of the vector's elements in plain sums. With offsets, it is 1 / kPlain, so that the sums stay finite
  // until they are multiplied by offsets. Without, it makes plain sums equal to the contribution of `zero` to sums of
  // codes.
  static constexpr float plain_factor() {
    return Codes::has_offset ? 1 / kPlain : float(Codes::zero) / float(Codes::factor);
  }
  // Divides each element by 2^exponent of its code. -> the groups' plain sums of the elements before
  static Floats<groups> divided(thread Elements& x) {
    constexpr uint fours = columns / 4 / groups;
    constexpr float factor = plain_factor();
    Floats<groups> sums;
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      float4 sum = 0;
#pragma unroll
      for (uint n = g * fours; n < (g + 1) * fours; ++n) {
        if (Codes::has_offset || off_zero) sum = fma(x.at[n], float4(factor), sum);
#pragma unroll
        for (uint m = 0; m < 4; ++m) x.at[n][m] *= 1 / float(1u << Codes::exponent(4 * n + m));
      }
      sums.at[g] = sum.x + sum.y + (sum.z + sum.w);
    }
    return sums;
  }

  static void load_chunks(thread const DotRows<At>& rows, Weights<uchar> weights, constant WeightParams& params,
                          ChunkPosition position, uint left, thread RowWords<words>& chunks) {
#pragma unroll
    for (uint r = 0; r < kDotRows; ++r) {
      ChunkPosition at = position;
      device const uchar* row = row_of(weights.data + (r % 2 ? rows.gap : 0), rows.data.at[r], at);
      Layout::load(row, at, wide ? columns : left, wide || params.layout == WeightLayout::rows_wide, chunks.row[r]);
    }
  }
  // Loads the scales and offsets of the rows' chunks, from the chunks themselves or from separate tensors.
  static void load_numbers(thread const DotRows<At>& rows, thread const RowWords<words>& chunks, ChunkPosition position,
                           Weights<uchar> weights, constant WeightParams& params, uint column, thread Numbers& scales,
                           thread Numbers& offsets) {
    if (Codes::own_scales) {
#pragma unroll
      for (uint r = 0; r < kDotRows; ++r) {
        Floats<groups> scale, offset;
        Layout::numbers(chunks.row[r], position, scale, offset);
        for (uint g = 0; g < groups; ++g) scales.of[g].at[r] = scale.at[g];
        for (uint g = 0; g < groups && Codes::has_offset; ++g) offsets.of[g].at[r] = offset.at[g];
      }
      return;
    }
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      const At group = (column + g * (columns / groups)) >> params.group_shift;
      load_scales<Codes>(weights.scale, rows.scale, group * At(params.scale.group), params.scale_type, scales.of[g]);
      if (!Codes::has_offset) continue;
      load_scales<Codes>(weights.offset, rows.offset, group * At(params.offset.group), params.scale_type,
                         offsets.of[g]);
    }
    if (!Codes::e4m3_scale) return;
    const float factor = load_factor(weights.offset, params);
    for (uint i = 0; i < groups * kDotRows; ++i) scales.of[i / kDotRows].at[i % kDotRows] *= factor;
  }

  // The scale and the offset of a group are applied once to the sum of its codes.
  template <bool reordered, typename V>
  static void add(thread DotRows<At>& rows, float weight, device const V* vector, Weights<uchar> weights,
                  constant WeightParams& params, uint length, uint column) {
    const ChunkPosition position = Layout::position(column);
    RowWords<words> chunks;
    load_chunks(rows, weights, params, position, length - column, chunks);
    Elements x;
    load<reordered>(vector, column, length, x);
    Numbers scales, offsets;
    load_numbers(rows, chunks, position, weights, params, column, scales, offsets);
    const Floats<groups> plain = divided(x);
    Numbers totals;
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      multiply_codes<Codes, centred>(chunks, x, g, off_zero ? -plain.at[g] : 0, totals.of[g]);
    }
#pragma unroll
    for (uint r = 0; r < kDotRows; ++r) rows.sum[r] += weight * row_sum(totals, plain, chunks, scales, offsets, r);
  }
  // The same with wide chunks, for several vectors: each code is unpacked once and multiplied by the elements of each
  // vector, which are loaded 8 at a time.
  template <bool reordered, uint N, typename V>
  static void add_several(thread const DotRows<At>& rows, thread const SeveralVectors<V, N>& several,
                          Weights<uchar> weights, constant WeightParams& params, uint column,
                          thread SeveralSums<N>& sums) {
    const ChunkPosition position = Layout::position(column);
    RowWords<words> chunks;
    load_chunks(rows, weights, params, position, columns, chunks);
    Numbers scales, offsets;
    load_numbers(rows, chunks, position, weights, params, column, scales, offsets);
    Numbers totals[N] = {};
    Floats<groups> plain[N] = {};
#pragma unroll
    for (uint i = 0; i < columns; i += 8) {
      const uint g = i * groups / columns;
      Vectors<2> codes[kDotRows], x[N];
      // Elements of both of two vectors and codes of one row at a time take fewer registers; for four vectors, elements
      // of one and codes of all rows.
      if (N <= 2) {
#pragma unroll
        for (uint t = 0; t < N; ++t) {
          load_eight<reordered>(several.at(t), column_of(column, i), x[t]);
          divide_eight(x[t], i, totals[t].of[g], plain[t].at[g]);
        }
#pragma unroll
        for (uint r = 0; r < kDotRows; ++r) {
          Codes::template eight<centred>(chunks.row[r], i, codes[r]);
#pragma unroll
          for (uint t = 0; t < N; ++t) add_eight(codes[r], x[t], totals[t].of[g].at[r]);
        }
        continue;
      }
#pragma unroll
      for (uint r = 0; r < kDotRows; ++r) Codes::template eight<centred>(chunks.row[r], i, codes[r]);
#pragma unroll
      for (uint t = 0; t < N; ++t) {
        load_eight<reordered>(several.at(t), column_of(column, i), x[t]);
        divide_eight(x[t], i, totals[t].of[g], plain[t].at[g]);
#pragma unroll
        for (uint r = 0; r < kDotRows; ++r) add_eight(codes[r], x[t], totals[t].of[g].at[r]);
      }
    }
#pragma unroll
    for (uint i = 0; i < N * kDotRows; ++i) {
      const uint t = i / kDotRows, r = i % kDotRows;
      sums.of[t].at[r] += row_sum(totals[t], plain[t], chunks, scales, offsets, r);
    }
  }
  // Divides elements i to i + 7 of a vector by 2^exponent of their codes. Before, subtracts `zero` times their sum from
  // the sums of the rows, and adds it to `plain` as in `divided`.
  static void divide_eight(thread Vectors<2>& x, uint i, thread Floats<kDotRows>& sums, thread float& plain) {
    if (Codes::has_offset || off_zero) {
      const float4 four = (x.at[0] + x.at[1]) * plain_factor();
      const float added = four.x + four.y + (four.z + four.w);
      for (uint r = 0; r < kDotRows && off_zero; ++r) sums.at[r] -= added;
      if (Codes::has_offset) plain += added;
    }
#pragma unroll
    for (uint n = 0; n < 8; ++n) x.at[n / 4][n % 4] *= 1 / float(1u << Codes::exponent(i + n));
  }
  // sum += eight codes times elements of a vector
  static void add_eight(thread const Vectors<2>& codes, thread const Vectors<2>& x, thread float& sum) {
#pragma unroll
    for (uint n = 0; n < 8; ++n) sum = fma(codes.at[n / 4][n % 4], x.at[n / 4][n % 4], sum);
  }
  // The product of a row's chunk with the vector, from the groups' sums of codes and the vector's plain sums.
  static float row_sum(thread const Numbers& totals, thread const Floats<groups>& plain,
                       thread const RowWords<words>& chunks, thread const Numbers& scales,
                       thread const Numbers& offsets, uint r) {
    float scaled = 0, added = 0;
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      const float scale = scales.of[g].at[r], total = totals.of[g].at[r];
      scaled = g == 0 ? total * scale : fma(total, scale, scaled);
      if (!Codes::has_offset) continue;
      float offset = offsets.of[g].at[r];
      if (centred) offset = fma(scale, float(Codes::middle), offset);
      added = g == 0 ? offset * plain.at[g] : fma(offset, plain.at[g], added);
    }
    const float total = fma(scaled, float(Codes::factor), not_finite(chunks.row[r], scales, offsets, r));
    return Codes::has_offset ? fma(added, kPlain, total) : total;
  }
  // Returns NaN if a code is NaN or a scale or offset is not finite, else 0. An infinite scale gives NaN when
  // multiplied by a code of 0, or when terms of both signs are added. In a block, one half makes all scales infinite
  // and another one all offsets, so the first group is enough.
  static float not_finite(thread const Words<words>& codes, thread const Numbers& scales, thread const Numbers& offsets,
                          uint r) {
    uint nan = 0;
#pragma unroll
    for (uint n = 0; n < words; ++n) nan |= Codes::nan_bits(codes.at[n]);
    if (nan) return NAN;
    if (Codes::e8m0_scale) return 0;
    float sum = scales.of[0].at[r] - scales.of[0].at[r];
    if (Codes::e4m3_scale && groups == 2) sum += scales.of[groups - 1].at[r] - scales.of[groups - 1].at[r];
    if (Codes::own_scales && Codes::has_offset) sum += offsets.of[0].at[r] - offsets.of[0].at[r];
    return sum;
  }
};

}  // namespace moe_metal
