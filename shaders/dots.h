// Rows of weights times one vector, for few tokens. `lanes` lanes have a tile of kDotRows rows; each reads a chunk of
// all of these rows at a time.
//
// A chunk type defines what a lane loads:
//   Data        element type of the weights' buffer
//   lanes       of a tile; a simdgroup has 32 / lanes tiles
//   apart       columns from a lane's chunk to the next lane's
//   step        columns of the chunks of all lanes
//   per_lane    whether lanes are independent, so that they may work on different experts
//   scale_rows  rows that share a scale
//   At          type of offsets within an expert's matrix: uint if the host knows that all are below 4 GB, which takes
//               half the registers of a pointer and adds at full rate; else long
// With dense weights, a tile has all lanes of a simdgroup. Packed rows are short, and a lane needs 32 elements of x for
// 16 bytes of 4-bit weights. So a tile has 16 lanes, which read 256 bytes of a row (two cache lines of Apple's GPUs),
// and the other tile reads the same x. On an H200, 16 lanes were faster than 8 for one token, 8 for more.
#pragma once
#include "dots_dense.h"
#include "dots_packed.h"

namespace moe_metal {

// A thread's position in the work of its threadgroup. The columns of a row are divided into `parts` parts, one for each
// of so many simdgroups, which have the same tiles: a simdgroup has every parts-th step of the columns.
struct Position {
  uint lane, part, tile;  // tile: in the threadgroup
};
template <typename Chunk>
Position position_of(uint thread_index, uint parts) {
  Position position;
  position.lane = thread_index % 32;
  position.part = thread_index / 32 % parts;
  position.tile = thread_index / 32 / parts * (32 / Chunk::lanes) + position.lane / Chunk::lanes;
  return position;
}

// sum[r] += this lane's columns of the product of row r and vector
template <typename Chunk, typename V>
void add_rows(thread DotRows<typename Chunk::At>& rows, device const V* vector, Weights<typename Chunk::Data> weights,
              constant WeightParams& params, uint length, Position position, uint parts) {
  for (uint column = position.part * Chunk::step + position.lane % Chunk::lanes * Chunk::apart; column < length;
       column += parts * Chunk::step) {
    Chunk::template add<false>(rows, 1, vector, weights, params, length, column);
  }
}

// The same for several vectors, with wide chunks. -> this lane's sums
template <typename Chunk, uint N, typename V>
SeveralSums<N> several_sums(thread const DotRows<typename Chunk::At>& rows, thread const SeveralVectors<V, N>& several,
                            Weights<typename Chunk::Data> weights, constant WeightParams& params, uint length,
                            Position position, uint parts) {
  SeveralSums<N> sums = {};
  for (uint column = position.part * Chunk::step + position.lane % Chunk::lanes * Chunk::apart; column < length;
       column += parts * Chunk::step) {
    Chunk::template add_several<false>(rows, several, weights, params, column, sums);
  }
  return sums;
}

// partial[simdgroup][tile][r] = the sum of row r over the lanes of the tile
template <typename Chunk>
void store_partial(thread const float* sums, threadgroup float* partial, uint thread_index) {
  for (uint r = 0; r < kDotRows; ++r) {
    float sum = sums[r];
    if (Chunk::lanes == 32) {
      sum = simd_sum(sum);
    } else {
      for (ushort other = Chunk::lanes / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, other);
    }
    if (thread_index % Chunk::lanes == 0) partial[thread_index / Chunk::lanes * kDotRows + r] = sum;
  }
}
template <typename Chunk>
void store_partial(thread const DotRows<typename Chunk::At>& rows, threadgroup float* partial, uint thread_index) {
  store_partial<Chunk>(rows.sum, partial, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of row r of a tile over the parts of its columns.
template <typename Chunk>
float sum_of_parts(threadgroup const float* partial, uint tile, uint parts, uint r) {
  constexpr uint tiles = 32 / Chunk::lanes;  // of a simdgroup
  float sum = 0;
  for (uint s = tile / tiles * parts; s < (tile / tiles + 1) * parts; ++s) {
    sum += partial[(s * tiles + tile % tiles) * kDotRows + r];
  }
  return sum;
}

// The number of partial sums of a threadgroup, for any number of parts.
template <typename Chunk>
constexpr uint most_partial() {
  return kRowSimdgroups * (32 / Chunk::lanes) * kDotRows;
}
template <typename Chunk>
uint rows_of_threadgroup(uint simdgroups, uint parts) {
  return simdgroups / parts * (32 / Chunk::lanes) * kDotRows;
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
