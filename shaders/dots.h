// Rows of weights times one vector, for few tokens: a team of lanes walks the columns of a few rows together.
//
// A chunk is what a team takes of a row at a time: a type that tells the weights' format and how a lane loads its
// share.
//   Data      what the weights' buffer holds        lanes       of a team
//   columns   of a chunk                            step        from a lane's first column to the next lane's
//   per_lane  whether a lane's share is whole by itself, so that lanes may be at different experts
//   scale_rows  rows that share a scale
// A simdgroup has 32 / lanes teams, each with rows of its own. Dense weights take a whole simdgroup. Packed rows are
// short, and a lane needs 32 of x for 16 bytes of 4-bit weights: 16 lanes take 256 bytes of a row, two cache lines of
// Apple's GPUs, and the other team reads the same x. On an H200 16 lanes were faster than 8 for one token, 8 for more.
#pragma once
#include "rows.h"
#include "weights.h"

namespace moe_metal {

// The rows of weights of a team, where they begin, and its lane's sums for them.
struct ChunkRows {
  Offsets<kChunkRows> data, scale, offset;
  float sum[kChunkRows];
};

template <typename Chunk>
void set_row(thread ChunkRows& rows, uint r, uint row, constant WeightParams& params) {
  rows.data.at[r] = row * params.row;
  rows.scale.at[r] = row / Chunk::scale_rows * params.scale.row;
  rows.offset.at[r] = row / Chunk::scale_rows * params.offset.row;
}

// ------------------------------------------------------------------------------------------ dense

// sums += scale * (this lane's share of the rows, from `column` on) * vector
template <typename Chunk, typename V>
void add_dense(thread ChunkRows& rows, float scale, device const V* vector, Weights<typename Chunk::Data> weights,
               constant WeightParams& params, uint length, uint column) {
  Vectors<Chunk::vectors> v, w[kChunkRows];
  Chunk::load(vector, column, length, 1, v);
  for (uint r = 0; r < kChunkRows; ++r) {
    Chunk::load(weights.data + rows.data.at[r], column, length, params.column, w[r]);
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
  static void add(thread ChunkRows& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<WideChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
};
template <typename T>
struct AnyChunk {
  using Data = T;
  enum : uint { lanes = 32, vectors = 1, step = 1, columns = 128, scale_rows = 1, per_lane = 0 };
  template <typename V>
  static void load(device const V* row, uint column, uint length, long stride, thread Vectors<vectors>& values) {
    for (uint n = 0; n < 4; ++n) {
      const uint c = column + 32 * n;
      values.at[0][n] = c < length ? float(row[c * stride]) : 0;
    }
  }
  template <bool placed, typename V>
  static void add(thread ChunkRows& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<AnyChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
};

// ------------------------------------------------------------------------------------------ packed

// A lane's piece of each row.
template <uint N>
struct RowWords {
  Words<N> row[kChunkRows];
};

// sums[r] = the codes of row r, centred or not, times the piece of the vector; NaN when one of them is.
template <typename Codes, bool centred, uint N, uint M>
void multiply_codes(thread const RowWords<N>& words, thread const Vectors<M>& piece, thread Floats<kChunkRows>& sums) {
#pragma unroll
  for (uint r = 0; r < kChunkRows; ++r) sums.at[r] = 0;
#pragma unroll
  for (uint i = 0; i < 4 * M; i += 8) {
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
#pragma unroll
  for (uint r = 0; r < kChunkRows; ++r) {
    uint nan = 0;
#pragma unroll
    for (uint n = 0; n < N; ++n) nan |= Codes::nan_bits(words.row[r].at[n]);
    sums.at[r] = nan ? NAN : sums.at[r];
  }
}

// Where element i of inner, which is ours to lay out, lies for packed weights: what the lanes of a team load together,
// 4 of each lane's piece, lies side by side. Where each lane's 128 bytes did, `down` waited for the cache (NVIDIA
// H200).
inline uint packed_place(uint i) {
  const uint lane = i % kPackedChunk / kPackedColumns, four = i % kPackedColumns / 4;
  return i / kPackedChunk * kPackedChunk + (four * kPackedLanes + lane) * 4 + i % 4;
}

MOE_METAL_CONSTANT float kPlain = 256;

// Wide: pieces of kPackedColumns, for whole pieces in groups of at least as many, and for rows of weights and vectors
// whose loads are aligned. Else pieces of kNarrowColumns, which lie in one group whatever its size. Centred codes are
// for activations in float: offsets lie near -middle * scale, so sums of bare codes are large and cancel against
// theirs, with 2 to 3 times the error of values summed one by one. 16 bits hide that, and save the subtraction.
template <typename Codes, bool wide, bool centred>
struct PackedChunk {
  using Data = uchar;
  enum : uint {
    lanes = kPackedLanes,
    step = wide ? kPackedColumns : kNarrowColumns,
    columns = lanes * step,
    scale_rows = Codes::scale_rows,
    per_lane = 1,
    words = (step * Codes::bits + 31) / 32
  };
  using Piece = Vectors<step / 4>;

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
      } else if (placed) {
        eight.at[0] = load4_wide(vector + packed_place(column + n));
        eight.at[1] = load4_wide(vector + packed_place(column + n + 4));
      } else {
        load_wide(vector + column + n, eight);
      }
      piece.at[n / 4] = eight.at[0];
      piece.at[n / 4 + 1] = eight.at[1];
    }
  }
  // Each element is divided by its code's place. -> the sum before, divided by kPlain, or it might be infinite before
  // its offset
  static float divided(thread Piece& piece) {
    float4 sum = 0;
#pragma unroll
    for (uint n = 0; n < step / 4; ++n) {
      if (Codes::has_offset) sum = fma(piece.at[n], float4(1 / kPlain), sum);
#pragma unroll
      for (uint m = 0; m < 4; ++m) piece.at[n][m] *= 1 / float(1u << Codes::place(4 * n + m));
    }
    return sum.x + sum.y + (sum.z + sum.w);
  }

  // Scale and offset count once for all codes of a piece.
  template <bool placed, typename V>
  static void add(thread ChunkRows& rows, float weight, device const V* vector, Weights<uchar> weights,
                  constant WeightParams& params, uint length, uint column) {
    RowWords<words> pieces;
#pragma unroll
    for (uint r = 0; r < kChunkRows; ++r) {
      load_codes<Codes, step>(weights.data + rows.data.at[r] + column / 8 * Codes::bits, wide ? step : length - column,
                              wide || params.layout == WeightLayout::rows_wide, pieces.row[r]);
    }
    Piece piece;
    load<placed>(vector, column, length, piece);
    const long group = column >> params.group_shift;
    Floats<kChunkRows> scale, offset, sum;
    load_scales<Codes>(weights.scale + group * params.scale.group, rows.scale, params.scale_type, scale);
    if (Codes::has_offset) {
      load_scales<Codes>(weights.offset + group * params.offset.group, rows.offset, params.scale_type, offset);
    }
    const float plain = divided(piece);
    multiply_codes<Codes, centred>(pieces, piece, sum);
#pragma unroll
    for (uint r = 0; r < kChunkRows; ++r) {
      // Times a code of 0 an infinite scale is NaN, and so are its products with x, whose signs differ.
      const float nan = Codes::e8m0_scale ? 0 : scale.at[r] - scale.at[r];
      const float scaled = fma(sum.at[r] * scale.at[r], float(Codes::factor), nan);
      if (centred && Codes::has_offset) offset.at[r] = fma(scale.at[r], float(Codes::middle), offset.at[r]);
      rows.sum[r] += weight * (Codes::has_offset ? fma(offset.at[r] * plain, kPlain, scaled) : scaled);
    }
  }
};

// ------------------------------------------------------------------------------------------ sums

// Where a thread works: `split` simdgroups are a set, of which each team has kChunkRows rows, and the simdgroup takes
// every split-th of their chunks from `part` on.
struct Place {
  uint lane, part, team;  // the team's number among those of the threadgroup that have rows of their own
};
template <typename Chunk>
Place place_of(uint thread_index, uint split) {
  Place place;
  place.lane = thread_index % 32;
  place.part = thread_index / 32 % split;
  place.team = thread_index / 32 / split * (32 / Chunk::lanes) + place.lane / Chunk::lanes;
  return place;
}

// sum[r] += (this lane's share of row r) * vector
template <typename Chunk, typename V>
void add_rows(thread ChunkRows& rows, device const V* vector, Weights<typename Chunk::Data> weights,
              constant WeightParams& params, uint length, Place place, uint split) {
  for (uint column = place.part * Chunk::columns + place.lane % Chunk::lanes * Chunk::step; column < length;
       column += split * Chunk::columns) {
    Chunk::template add<false>(rows, 1, vector, weights, params, length, column);
  }
}

// shares[simdgroup][team][r] = the team's sum of row r
template <typename Chunk>
void share_sums(thread const ChunkRows& rows, threadgroup float* shares, uint thread_index) {
  for (uint r = 0; r < kChunkRows; ++r) {
    float sum = rows.sum[r];
    if (Chunk::lanes == 32) {
      sum = simd_sum(sum);
    } else {
      for (ushort other = Chunk::lanes / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, other);
    }
    if (thread_index % Chunk::lanes == 0) shares[thread_index / Chunk::lanes * kChunkRows + r] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of a team's row r over the simdgroups that shared it.
template <typename Chunk>
float shared_sum(threadgroup const float* shares, uint team, uint split, uint r) {
  constexpr uint teams = 32 / Chunk::lanes;
  float sum = 0;
  for (uint s = team / teams * split; s < (team / teams + 1) * split; ++s) {
    sum += shares[(s * teams + team % teams) * kChunkRows + r];
  }
  return sum;
}

// Of shares, for any split; and the rows of a threadgroup.
template <typename Chunk>
constexpr uint most_shares() {
  return kChunkSimdgroups * (32 / Chunk::lanes) * kChunkRows;
}
template <typename Chunk>
uint rows_of_threadgroup(uint simdgroups, uint split) {
  return simdgroups / split * (32 / Chunk::lanes) * kChunkRows;
}

}  // namespace moe_metal

// The two ways that a library's format is read: wherever loads are aligned, and everywhere.
#ifndef MOE_METAL_FORMAT
#define wide_chunk(dtype) moe_metal::WideChunk<dtype>
#define any_chunk(dtype) moe_metal::AnyChunk<dtype>
#else
#define wide_chunk(dtype) moe_metal::PackedChunk<weights_codes, true, sizeof(dtype) == 4>
#define any_chunk(dtype) moe_metal::PackedChunk<weights_codes, false, sizeof(dtype) == 4>
#endif
