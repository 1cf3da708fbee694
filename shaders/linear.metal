// The op linear, in one dispatch: output[t] = weight * x[t] + bias, with a weight in any format.
//
// x [T, H], weight [N, H], bias [N], output [T, N].
//
// _rows, for few tokens: each token reads the weight, or 2 or 4 tokens together (_rows2, _rows4), with the weight
// unpacked once. Grid: tokens, or groups of them, along x, so that the threadgroups of one block of rows read it at
// about the same time, from the cache; blocks of rows along y. WeightParams.split simdgroups share the work on a row.
// _tiles, for many tokens: tiles of TileRows tokens by tile_weight_rows rows of the weight. Grid: one threadgroup per
// tile, along x.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "dots.h"
#include "rows.h"
#include "tiles.h"

namespace moe_metal {

template <typename T, typename Chunk>
[[kernel]] void linear_rows(device const T* x [[buffer(0)]], device const typename Chunk::Data* weight [[buffer(1)]],
                            device const uchar* scale [[buffer(2)]], device const uchar* offset [[buffer(3)]],
                            device const T* bias [[buffer(4)]], device T* output [[buffer(5)]],
                            constant LinearParams& params [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float shares[most_shares<Chunk>()];
  const uint token = group.x, split = params.weight.split, block_rows = rows_of_threadgroup<Chunk>(simdgroups, split);
  if (token >= params.T) return;
  const Place place = place_of<Chunk>(thread_index, split);
  const uint block = group.y * block_rows, first = block + place.team * kChunkRows;
  ChunkRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kChunkRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.N - 1), params.weight);
  if (first < params.N) {
    add_rows<Chunk>(rows, x + ulong(token) * params.H, of_expert(weight, scale, offset, 0, params.weight),
                    params.weight, params.H, place, split);
  }
  share_sums<Chunk>(rows, shares, thread_index);
  const uint n = block + thread_index;
  if (thread_index >= block_rows || n >= params.N) return;
  float value = shared_sum<Chunk>(shares, thread_index / kChunkRows, split, thread_index % kChunkRows);
  if (params.bias != ParameterType::absent) value += load(bias, n, params.bias);
  output[ulong(token) * params.N + n] = T(value);
}

// Tokens is 2 or 4. A thread writes one output.
template <typename T, typename Chunk, uint Tokens>
[[kernel]] void linear_several_rows(device const T* x [[buffer(0)]],
                                    device const typename Chunk::Data* weight [[buffer(1)]],
                                    device const uchar* scale [[buffer(2)]], device const uchar* offset [[buffer(3)]],
                                    device const T* bias [[buffer(4)]], device T* output [[buffer(5)]],
                                    constant LinearParams& params [[buffer(6)]],
                                    uint2 group [[threadgroup_position_in_grid]],
                                    uint thread_index [[thread_index_in_threadgroup]],
                                    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float shares[Tokens * most_shares<Chunk>()];
  const uint token = group.x * Tokens, split = params.weight.split;
  const uint block_rows = rows_of_threadgroup<Chunk>(simdgroups, split);
  if (token >= params.T) return;
  const Place place = place_of<Chunk>(thread_index, split);
  const uint block = group.y * block_rows, first = block + place.team * kChunkRows;
  ChunkRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kChunkRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.N - 1), params.weight);
  SeveralVectors<T, Tokens> tokens = {x, params.H, {}};
  for (uint t = 0; t < Tokens; ++t) tokens.row[t] = min(token + t, params.T - 1);  // the last one is repeated
  SeveralSums<Tokens> sums = {};
  if (first < params.N) {
    sums = several_sums<Chunk, Tokens>(rows, tokens, of_expert(weight, scale, offset, 0, params.weight), params.weight,
                                       params.H, place, split);
  }
#pragma unroll
  for (uint t = 0; t < Tokens; ++t) share_sums<Chunk>(sums.of[t].at, shares + t * most_shares<Chunk>(), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint t = thread_index / block_rows, row = thread_index % block_rows, n = block + row;
  if (t >= Tokens || token + t >= params.T || n >= params.N) return;
  float value = shared_sum<Chunk>(shares + t * most_shares<Chunk>(), row / kChunkRows, split, row % kChunkRows);
  if (params.bias != ParameterType::absent) value += load(bias, n, params.bias);
  output[ulong(token + t) * params.N + n] = T(value);
}

// A band of tiles of tokens goes through all blocks of rows together and shares weights in the cache.
template <typename T, typename Reader, uint TileRows>
[[kernel]] void linear_tiles(device const T* x [[buffer(0)]], device const typename Reader::Data* weight [[buffer(1)]],
                             device const uchar* scale [[buffer(2)]], device const uchar* offset [[buffer(3)]],
                             device const T* bias [[buffer(4)]], device T* output [[buffer(5)]],
                             constant LinearParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint4 memory[TileRows * Reader::stride * sizeof(T) / sizeof(uint4)];
  threadgroup uint rows[TileRows];
  constexpr uint across = tile_matrices(TileRows), block = tile_weight_rows(TileRows);
  const uint blocks = (params.N + block - 1) / block, band = params.tiles_per_band;
  const uint token = (group / (band * blocks) * band + group % band) * TileRows;
  if (token >= params.T) return;  // the last band may have fewer tiles
  const uint count = min(TileRows, params.T - token);
  for (uint j = thread_index; j < count; j += kTileThreads) rows[j] = token + j;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint first = group / band % blocks * block + first_of_lane<block>(thread_index);
  RowNumbers<across> numbers;
  for (uint n = 0; n < across; ++n) numbers.at[n] = min(first + n, params.N - 1);
  Products<TileRows> products;
  multiply_tile<TileRows, Reader>(products, memory, x, rows, count, params.wide_x,
                                  of_expert(weight, scale, offset, 0, params.weight), params.weight, numbers, params.H,
                                  thread_index);
  Floats<across> biases;
  load_biases(bias, 0, numbers, params.bias, biases);
  const uint column = matrix_place(thread_index % 32).column;
#pragma unroll
  for (uint i = 0; i < 2 * products.down; ++i) {
    const uint j = i / 2 * 8 + column + i % 2;
    if (j >= count) continue;
    device T* to = output + ulong(token + j) * params.N;
    for (uint n = 0; n < across; ++n) {
      if (first + n < params.N) to[first + n] = T(products.at[i / 2][n][i % 2] + biases.at[n]);
    }
  }
}

}  // namespace moe_metal

// clang-format off
#define instantiate_rows(dtype, suffix, read) \
  instantiate_kernel("linear_rows" suffix weights_suffix "_" #dtype, moe_metal::linear_rows<dtype, read##_chunk(dtype)>)
#define instantiate_several(dtype, suffix, read, tokens)                                 \
  instantiate_kernel("linear_rows" #tokens suffix weights_suffix "_" #dtype, \
                     moe_metal::linear_several_rows<dtype, read##_chunk(dtype), tokens>)
#define instantiate_tiles(dtype, suffix, read, rows)                                   \
  instantiate_kernel("linear_tiles" #rows suffix weights_suffix "_" #dtype,   \
                     moe_metal::linear_tiles<dtype, read##_tile(dtype), rows>)
#if in_part(tiles16)
for_dtypes(instantiate_tiles, "", any, 16)
#endif
#if in_part(tiles32)
for_dtypes(instantiate_tiles, "", any, 32)
#endif
#if in_part(tiles64)
for_dtypes(instantiate_tiles, "", any, 64)
#endif
#if in_part(tiles16_wide)
for_dtypes(instantiate_tiles, "_wide", wide, 16)
#endif
#if in_part(tiles32_wide)
for_dtypes(instantiate_tiles, "_wide", wide, 32)
#endif
#if in_part(tiles64_wide)
for_dtypes(instantiate_tiles, "_wide", wide, 64)
#endif
#if in_part(rows)
for_dtypes(instantiate_rows, "", any)
#endif
#if in_part(rows_wide)
for_dtypes(instantiate_rows, "_wide", wide)
#endif
#if in_part(rows2_wide)
for_dtypes(instantiate_several, "_wide", wide, 2)
#endif
#if in_part(rows4_wide)
for_dtypes(instantiate_several, "_wide", wide, 4)
#endif
