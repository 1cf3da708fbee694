// Rows of weights times one vector, for few tokens: a team of lanes goes through the columns of a few rows together.
//
// A chunk is the part of a row that a team reads at a time. A chunk type defines how lanes load their shares:
//   Data      element type of the weights' buffer   lanes       of a team
//   columns   of a chunk                            step        from a lane's first column to the next lane's
//   per_lane  whether lanes are independent, so that they may work on different experts
//   scale_rows  rows that share a scale
//   At        type of offsets within an expert's matrix: uint if the host knows that all are below 4 GB, which takes
//             half the registers of a pointer and adds at full rate; else long
// A simdgroup has 32 / lanes teams, each with its own rows. With dense weights, a team is the whole simdgroup. Packed
// rows are short, and a lane needs 32 elements of x for 16 bytes of 4-bit weights. So a team has 16 lanes, which read
// 256 bytes of a row (two cache lines of Apple's GPUs), and the other team reads the same x. On an H200, 16 lanes were
// faster than 8 for one token, 8 for more.
#pragma once
#include "rows.h"
#include "weights.h"

namespace moe_metal {

template <bool is_short>
struct PlaceOf {
  using Type = long;
};
template <>
struct PlaceOf<true> {
  using Type = uint;
};

// The rows of a team: their offsets in the expert's matrix, and this lane's sums. If gate and up are separate, every
// second row is a row of up and `gap` further.
template <typename At>
struct ChunkRows {
  Offsets<At, kChunkRows> data, scale, offset;
  long gap;
  float sum[kChunkRows];
};

// Several vectors that are multiplied by the same rows: rows of a matrix, which are `apart` elements apart.
template <typename V, uint N>
struct SeveralVectors {
  device const V* first;
  uint apart, row[N];
  device const V* at(uint t) const thread { return first + ulong(row[t]) * apart; }
};
// A lane's sums of the rows for each vector.
template <uint N>
struct SeveralSums {
  Floats<kChunkRows> of[N];
};

template <typename Chunk, typename At>
void set_row(thread ChunkRows<At>& rows, uint r, uint row, constant WeightParams& params) {
  rows.data.at[r] = row * At(params.row);
  rows.scale.at[r] = row / Chunk::scale_rows * At(params.scale.row);
  rows.offset.at[r] = row / Chunk::scale_rows * At(params.offset.row);
}

// ------------------------------------------------------------------------------------------ dense

// sums += scale * (this lane's share of the rows, from `column` on) * vector
template <typename Chunk, typename V>
void add_dense(thread ChunkRows<long>& rows, float scale, device const V* vector, Weights<typename Chunk::Data> weights,
               constant WeightParams& params, uint length, uint column) {
  Vectors<Chunk::vectors> v, w[kChunkRows];
  Chunk::load(vector, column, length, 1, v);
  for (uint r = 0; r < kChunkRows; ++r) {
    Chunk::load(weights.data + (r % 2 ? rows.gap : 0) + rows.data.at[r], column, length, params.column, w[r]);
  }
  for (uint r = 0; r < kChunkRows; ++r) {
    float sum = 0;
    for (uint n = 0; n < Chunk::vectors; ++n) sum += dot(w[r].at[n], v.at[n]);
    rows.sum[r] += scale * sum;
  }
}

template <typename T>
struct WideChunk {
  using Data = T;
  using At = long;
  enum : uint {
    lanes = 32,
    vectors = Wide<T>::vectors,
    step = Wide<T>::elements,
    columns = 32 * step,
    scale_rows = 1,
    per_lane = 0
  };
  template <typename V>
  static void load(device const V* row, uint column, uint, long, thread Vectors<vectors>& values) {
    load_wide(row + column, values);
  }
  template <bool placed, typename V>
  static void add(thread ChunkRows<At>& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<WideChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
  // The same for several vectors, with one load of the weights. The order of each sum is the same as for one vector.
  template <bool placed, uint N, typename V>
  static void add_several(thread const ChunkRows<At>& rows, thread const SeveralVectors<V, N>& several,
                          Weights<T> weights, constant WeightParams&, uint column, thread SeveralSums<N>& sums) {
    Vectors<vectors> w[kChunkRows];
    for (uint r = 0; r < kChunkRows; ++r) {
      load_wide(weights.data + (r % 2 ? rows.gap : 0) + rows.data.at[r] + column, w[r]);
    }
#pragma unroll
    for (uint t = 0; t < N; ++t) {
      Vectors<vectors> v;
      load_wide(several.at(t) + column, v);
      for (uint r = 0; r < kChunkRows; ++r) {
        float sum = 0;
        for (uint n = 0; n < vectors; ++n) sum += dot(w[r].at[n], v.at[n]);
        sums.of[t].at[r] += sum;
      }
    }
  }
};
template <typename T>
struct AnyChunk {
  using Data = T;
  using At = long;
  enum : uint { lanes = 32, vectors = 1, step = 1, columns = 128, scale_rows = 1, per_lane = 0 };
  template <typename V>
  static void load(device const V* row, uint column, uint length, long stride, thread Vectors<vectors>& values) {
    for (uint n = 0; n < 4; ++n) {
      const uint c = column + 32 * n;
      values.at[0][n] = c < length ? float(row[c * stride]) : 0;
    }
  }
  template <bool placed, typename V>
  static void add(thread ChunkRows<At>& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<AnyChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
};

// ------------------------------------------------------------------------------------------ packed

// The base address of a row's piece. A 32-bit offset is added to the spot's, in 32 bits, instead of to the pointer.
inline device const uchar* row_of(device const uchar* matrix, uint row, thread Spot& spot) {
  spot.byte += row;
  return matrix;
}
inline device const uchar* row_of(device const uchar* matrix, long row, thread Spot&) { return matrix + row; }

// A lane's pieces, one of each row.
template <uint N>
struct RowWords {
  Words<N> row[kChunkRows];
};

// sums[r] = start + the dot product of a group's codes of row r with its elements of the vector.
template <typename Codes, bool centred, uint N, uint M>
void multiply_codes(thread const RowWords<N>& words, thread const Vectors<M>& piece, uint group, float start,
                    thread Floats<kChunkRows>& sums) {
  constexpr uint columns = 4 * M / Codes::groups;
#pragma unroll
  for (uint r = 0; r < kChunkRows; ++r) sums.at[r] = start;
#pragma unroll
  for (uint i = group * columns; i < (group + 1) * columns; i += 8) {
#pragma unroll
    for (uint r = 0; r < kChunkRows; ++r) {
      Vectors<2> codes;
      Codes::template eight<centred>(words.row[r], i, codes);
#pragma unroll
      for (uint n = 0; n < 8; ++n) {
        sums.at[r] = fma(codes.at[n / 4][n % 4], piece.at[i / 4 + n / 4][n % 4], sums.at[r]);
      }
    }
  }
}

// The place of element i in inner, whose layout we choose, for packed weights: elements that the lanes of a team load
// together, 4 of each lane's piece, are contiguous. With contiguous pieces of 128 bytes instead, `down` was limited by
// the cache (NVIDIA H200).
inline uint packed_place(uint i) {
  const uint lane = i % kPackedChunk / kPackedColumns, four = i % kPackedColumns / 4;
  return i / kPackedChunk * kPackedChunk + (four * kPackedLanes + lane) * 4 + i % 4;
}

MOE_METAL_CONSTANT float kPlain = 256;

// The scales, offsets or sums of each group of the rows' pieces.
template <uint groups>
struct GroupNumbers {
  Floats<kChunkRows> of[groups];
};

// Wide pieces have kPackedColumns columns. They need rows of whole pieces, groups of a size that the reader supports or
// of at least kPackedColumns, aligned rows of weights and vectors, and matrices below 4 GB. Otherwise pieces have
// kNarrowColumns, which are in one group whatever its size. Codes are centred for float activations: offsets are
// usually near -middle * scale, so sums of plain codes are large and cancel with the offsets, with 2 to 3 times the
// error of summing values. With 16-bit activations that error does not matter, and skipping the subtraction is faster.
template <typename Codes, bool centred>
struct PackedChunk {
  using Data = uchar;
  using At = typename PlaceOf<Codes::columns == kPackedColumns>::Type;
  using Layout = typename Codes::Layout;
  enum : uint {
    lanes = kPackedLanes,
    step = Codes::columns,
    wide = step == kPackedColumns,
    columns = lanes * step,
    scale_rows = Codes::scale_rows,
    per_lane = 1,
    words = Codes::words,
    groups = Codes::groups,
    off_zero = Codes::zero && !centred  // subtracts `zero` from sums instead of from each code
  };
  using Piece = Vectors<step / 4>;
  using Numbers = GroupNumbers<groups>;

  // The column of element n, a multiple of 8, of the piece at `column`.
  static uint column_of(uint column, uint n) {
    if (Codes::distance == kNarrowColumns) return column + n;
    constexpr uint apart = Codes::distance, between = apart / kNarrowColumns;
    const uint piece = column / kPackedColumns;
    return piece / between * (2 * apart) + piece % between * kNarrowColumns + n / kNarrowColumns * apart +
           n % kNarrowColumns;
  }
  template <bool placed, typename V>
  static void load_eight(device const V* vector, uint column, thread Vectors<2>& eight) {
    if (placed) {
      eight.at[0] = load4_wide(vector + packed_place(column));
      eight.at[1] = load4_wide(vector + packed_place(column + 4));
    } else {
      load_wide(vector + column, eight);
    }
  }
  template <bool placed, typename V>
  static void load(device const V* vector, uint column, uint length, thread Piece& piece) {
#pragma unroll
    for (uint n = 0; n < step; n += 8) {
      Vectors<2> eight;
      if (!wide) {
        for (uint m = 0; m < 8; ++m) {
          const uint c = column + n + m;
          eight.at[m / 4][m % 4] = c < length ? float(vector[placed ? packed_place(c) : c]) : 0;
        }
      } else {
        load_eight<placed>(vector, column_of(column, n), eight);
      }
      piece.at[n / 4] = eight.at[0];
      piece.at[n / 4 + 1] = eight.at[1];
    }
  }
  // The factor of the vector's elements in plain sums. With offsets, it is 1 / kPlain, so that the sums stay finite
  // until they are multiplied by offsets. Without, it makes plain sums equal to the contribution of `zero` to sums of
  // codes.
  static constexpr float plain_unit() {
    return Codes::has_offset ? 1 / kPlain : float(Codes::zero) / float(Codes::factor);
  }
  // Divides each element by 2^place of its code. -> the groups' plain sums of the elements before
  static Floats<groups> divided(thread Piece& piece) {
    constexpr uint fours = step / 4 / groups;
    constexpr float unit = plain_unit();
    Floats<groups> sums;
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      float4 sum = 0;
#pragma unroll
      for (uint n = g * fours; n < (g + 1) * fours; ++n) {
        if (Codes::has_offset || off_zero) sum = fma(piece.at[n], float4(unit), sum);
#pragma unroll
        for (uint m = 0; m < 4; ++m) piece.at[n][m] *= 1 / float(1u << Codes::place(4 * n + m));
      }
      sums.at[g] = sum.x + sum.y + (sum.z + sum.w);
    }
    return sums;
  }

  static void load_pieces(thread const ChunkRows<At>& rows, Weights<uchar> weights, constant WeightParams& params,
                          Spot spot, uint left, thread RowWords<words>& pieces) {
#pragma unroll
    for (uint r = 0; r < kChunkRows; ++r) {
      Spot at = spot;
      device const uchar* row = row_of(weights.data + (r % 2 ? rows.gap : 0), rows.data.at[r], at);
      Layout::load(row, at, wide ? step : left, wide || params.layout == WeightLayout::rows_wide, pieces.row[r]);
    }
  }
  // Loads the scales and offsets of the rows' pieces, from the pieces themselves or from separate tensors.
  static void load_numbers(thread const ChunkRows<At>& rows, thread const RowWords<words>& pieces, Spot spot,
                           Weights<uchar> weights, constant WeightParams& params, uint column, thread Numbers& scales,
                           thread Numbers& offsets) {
    if (Codes::own_scales) {
#pragma unroll
      for (uint r = 0; r < kChunkRows; ++r) {
        Floats<groups> scale, offset;
        Layout::numbers(pieces.row[r], spot, scale, offset);
        for (uint g = 0; g < groups; ++g) scales.of[g].at[r] = scale.at[g];
        for (uint g = 0; g < groups && Codes::has_offset; ++g) offsets.of[g].at[r] = offset.at[g];
      }
      return;
    }
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      const At group = (column + g * (step / groups)) >> params.group_shift;
      load_scales<Codes>(weights.scale, rows.scale, group * At(params.scale.group), params.scale_type, scales.of[g]);
      if (!Codes::has_offset) continue;
      load_scales<Codes>(weights.offset, rows.offset, group * At(params.offset.group), params.scale_type,
                         offsets.of[g]);
    }
    if (!Codes::e4m3_scale) return;
    const float factor = load_factor(weights.offset, params);
    for (uint i = 0; i < groups * kChunkRows; ++i) scales.of[i / kChunkRows].at[i % kChunkRows] *= factor;
  }

  // The scale and the offset of a group are applied once to the sum of its codes.
  template <bool placed, typename V>
  static void add(thread ChunkRows<At>& rows, float weight, device const V* vector, Weights<uchar> weights,
                  constant WeightParams& params, uint length, uint column) {
    const Spot spot = Layout::spot(column);
    RowWords<words> pieces;
    load_pieces(rows, weights, params, spot, length - column, pieces);
    Piece piece;
    load<placed>(vector, column, length, piece);
    Numbers scales, offsets;
    load_numbers(rows, pieces, spot, weights, params, column, scales, offsets);
    const Floats<groups> plain = divided(piece);
    Numbers totals;
#pragma unroll
    for (uint g = 0; g < groups; ++g) {
      multiply_codes<Codes, centred>(pieces, piece, g, off_zero ? -plain.at[g] : 0, totals.of[g]);
    }
#pragma unroll
    for (uint r = 0; r < kChunkRows; ++r) rows.sum[r] += weight * row_sum(totals, plain, pieces, scales, offsets, r);
  }
  // The same with wide pieces, for several vectors: each code is unpacked once and multiplied by the elements of each
  // vector, which are loaded 8 at a time.
  template <bool placed, uint N, typename V>
  static void add_several(thread const ChunkRows<At>& rows, thread const SeveralVectors<V, N>& several,
                          Weights<uchar> weights, constant WeightParams& params, uint column,
                          thread SeveralSums<N>& sums) {
    const Spot spot = Layout::spot(column);
    RowWords<words> pieces;
    load_pieces(rows, weights, params, spot, step, pieces);
    Numbers scales, offsets;
    load_numbers(rows, pieces, spot, weights, params, column, scales, offsets);
    Numbers totals[N] = {};
    Floats<groups> plain[N] = {};
#pragma unroll
    for (uint i = 0; i < step; i += 8) {
      const uint g = i * groups / step;
      Vectors<2> codes[kChunkRows], x[N];
      // Elements of both of two vectors and codes of one row at a time take fewer registers; for four vectors, elements
      // of one and codes of all rows.
      if (N <= 2) {
#pragma unroll
        for (uint t = 0; t < N; ++t) {
          load_eight<placed>(several.at(t), column_of(column, i), x[t]);
          divide_eight(x[t], i, totals[t].of[g], plain[t].at[g]);
        }
#pragma unroll
        for (uint r = 0; r < kChunkRows; ++r) {
          Codes::template eight<centred>(pieces.row[r], i, codes[r]);
#pragma unroll
          for (uint t = 0; t < N; ++t) add_eight(codes[r], x[t], totals[t].of[g].at[r]);
        }
        continue;
      }
#pragma unroll
      for (uint r = 0; r < kChunkRows; ++r) Codes::template eight<centred>(pieces.row[r], i, codes[r]);
#pragma unroll
      for (uint t = 0; t < N; ++t) {
        load_eight<placed>(several.at(t), column_of(column, i), x[t]);
        divide_eight(x[t], i, totals[t].of[g], plain[t].at[g]);
#pragma unroll
        for (uint r = 0; r < kChunkRows; ++r) add_eight(codes[r], x[t], totals[t].of[g].at[r]);
      }
    }
#pragma unroll
    for (uint i = 0; i < N * kChunkRows; ++i) {
      const uint t = i / kChunkRows, r = i % kChunkRows;
      sums.of[t].at[r] += row_sum(totals[t], plain[t], pieces, scales, offsets, r);
    }
  }
  // Divides elements i to i + 7 of a vector by 2^place of their codes. Before, subtracts `zero` times their sum from
  // the sums of the rows, and adds it to `plain` as in `divided`.
  static void divide_eight(thread Vectors<2>& x, uint i, thread Floats<kChunkRows>& sums, thread float& plain) {
    if (Codes::has_offset || off_zero) {
      const float4 four = (x.at[0] + x.at[1]) * plain_unit();
      const float added = four.x + four.y + (four.z + four.w);
      for (uint r = 0; r < kChunkRows && off_zero; ++r) sums.at[r] -= added;
      if (Codes::has_offset) plain += added;
    }
#pragma unroll
    for (uint n = 0; n < 8; ++n) x.at[n / 4][n % 4] *= 1 / float(1u << Codes::place(i + n));
  }
  // sum += eight codes times elements of a vector
  static void add_eight(thread const Vectors<2>& codes, thread const Vectors<2>& x, thread float& sum) {
#pragma unroll
    for (uint n = 0; n < 8; ++n) sum = fma(codes.at[n / 4][n % 4], x.at[n / 4][n % 4], sum);
  }
  // The product of a row's piece with the vector, from the groups' sums of codes and the vector's plain sums.
  static float row_sum(thread const Numbers& totals, thread const Floats<groups>& plain,
                       thread const RowWords<words>& pieces, thread const Numbers& scales,
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
    const float total = fma(scaled, float(Codes::factor), not_finite(pieces.row[r], scales, offsets, r));
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

// ------------------------------------------------------------------------------------------ sums

// The work of a thread: `split` simdgroups share the same rows, kChunkRows for each team. A simdgroup takes every
// split-th chunk of them, from `part` on.
struct Place {
  uint lane, part, team;  // teams are numbered in the threadgroup; simdgroups that share rows have the same teams
};
template <typename Chunk>
Place place_of(uint thread_index, uint split) {
  Place place;
  place.lane = thread_index % 32;
  place.part = thread_index / 32 % split;
  place.team = thread_index / 32 / split * (32 / Chunk::lanes) + place.lane / Chunk::lanes;
  return place;
}

// sum[r] += this lane's share of the product of row r and vector
template <typename Chunk, typename V>
void add_rows(thread ChunkRows<typename Chunk::At>& rows, device const V* vector, Weights<typename Chunk::Data> weights,
              constant WeightParams& params, uint length, Place place, uint split) {
  for (uint column = place.part * Chunk::columns + place.lane % Chunk::lanes * Chunk::step; column < length;
       column += split * Chunk::columns) {
    Chunk::template add<false>(rows, 1, vector, weights, params, length, column);
  }
}

// The same for several vectors, with wide pieces. -> this lane's shares of the sums
template <typename Chunk, uint N, typename V>
SeveralSums<N> several_sums(thread const ChunkRows<typename Chunk::At>& rows,
                            thread const SeveralVectors<V, N>& several, Weights<typename Chunk::Data> weights,
                            constant WeightParams& params, uint length, Place place, uint split) {
  SeveralSums<N> sums = {};
  for (uint column = place.part * Chunk::columns + place.lane % Chunk::lanes * Chunk::step; column < length;
       column += split * Chunk::columns) {
    Chunk::template add_several<false>(rows, several, weights, params, column, sums);
  }
  return sums;
}

// shares[simdgroup][team][r] = the sum of row r over the lanes of the team
template <typename Chunk>
void share_sums(thread const float* sums, threadgroup float* shares, uint thread_index) {
  for (uint r = 0; r < kChunkRows; ++r) {
    float sum = sums[r];
    if (Chunk::lanes == 32) {
      sum = simd_sum(sum);
    } else {
      for (ushort other = Chunk::lanes / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, other);
    }
    if (thread_index % Chunk::lanes == 0) shares[thread_index / Chunk::lanes * kChunkRows + r] = sum;
  }
}
template <typename Chunk>
void share_sums(thread const ChunkRows<typename Chunk::At>& rows, threadgroup float* shares, uint thread_index) {
  share_sums<Chunk>(rows.sum, shares, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of a team's row r over the simdgroups that share it.
template <typename Chunk>
float shared_sum(threadgroup const float* shares, uint team, uint split, uint r) {
  constexpr uint teams = 32 / Chunk::lanes;
  float sum = 0;
  for (uint s = team / teams * split; s < (team / teams + 1) * split; ++s) {
    sum += shares[(s * teams + team % teams) * kChunkRows + r];
  }
  return sum;
}

// The number of shares of a threadgroup, for any split.
template <typename Chunk>
constexpr uint most_shares() {
  return kChunkSimdgroups * (32 / Chunk::lanes) * kChunkRows;
}
template <typename Chunk>
uint rows_of_threadgroup(uint simdgroups, uint split) {
  return simdgroups / split * (32 / Chunk::lanes) * kChunkRows;
}

}  // namespace moe_metal

// The chunk types for a library's format: for aligned loads, and for any weights.
#ifndef MOE_METAL_FORMAT
#define wide_chunk(dtype) moe_metal::WideChunk<dtype>
#define any_chunk(dtype) moe_metal::AnyChunk<dtype>
#else
#define wide_chunk(dtype) moe_metal::PackedChunk<weights_codes(kPackedColumns), sizeof(dtype) == 4>
#define any_chunk(dtype) moe_metal::PackedChunk<weights_codes(kNarrowColumns), sizeof(dtype) == 4>
#endif
