// The op linear, in one dispatch: output[t] = weight * x[t] + bias, with a weight in any format.
//
// x [T, H], weight [N, H], bias [N], output [T, N].
//
// _rows, for few tokens, and with a matrix for each head of a token (a "token" is then a head of one): each reads the
// weight, or 2 or 4 tokens together (_rows2, _rows4), with the weight
// unpacked once. Grid: tokens, or 2 or 4 of them, along x, so that the threadgroups of one tile of rows read it at
// about the same time, from the cache; tiles of rows along y. WeightParams.parts simdgroups divide the columns of a
// row. _tiles, for many tokens: tiles of TileRows tokens by tile_weight_rows rows of the weight. Grid: one threadgroup
// per tile, along x.
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
  threadgroup float partial[most_partial<Chunk>()];
  const uint token = group.x, parts = params.weight.parts, tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts);
  if (token >= params.T * params.heads) return;
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kDotRows;
  DotRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kDotRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.N - 1), params.weight);
  if (first < params.N) {
    const uint head = token % params.heads;
    add_rows<Chunk>(rows, x + ulong(token / params.heads) * params.token_stride + ulong(head) * params.head_stride,
                    of_expert(weight, scale, offset, head, params.weight), params.weight, params.H, position, parts);
  }
  store_partial<Chunk>(rows, partial, thread_index);
  const uint n = begin + thread_index;
  if (thread_index >= tile_rows || n >= params.N) return;
  float value = sum_of_parts<Chunk>(partial, thread_index / kDotRows, parts, thread_index % kDotRows);
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
  threadgroup float partial[Tokens * most_partial<Chunk>()];
  const uint token = group.x * Tokens, parts = params.weight.parts;
  const uint tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts);
  if (token >= params.T) return;
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kDotRows;
  DotRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kDotRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.N - 1), params.weight);
  SeveralVectors<T, Tokens> tokens = {x, params.H, {}};
  for (uint t = 0; t < Tokens; ++t) tokens.row[t] = min(token + t, params.T - 1);  // the last one is repeated
  SeveralSums<Tokens> sums = {};
  if (first < params.N) {
    sums = several_sums<Chunk, Tokens>(rows, tokens, of_expert(weight, scale, offset, 0, params.weight), params.weight,
                                       params.H, position, parts);
  }
#pragma unroll
  for (uint t = 0; t < Tokens; ++t)
    store_partial<Chunk>(sums.of[t].at, partial + t * most_partial<Chunk>(), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint t = thread_index / tile_rows, row = thread_index % tile_rows, n = begin + row;
  if (t >= Tokens || token + t >= params.T || n >= params.N) return;
  float value = sum_of_parts<Chunk>(partial + t * most_partial<Chunk>(), row / kDotRows, parts, row % kDotRows);
  if (params.bias != ParameterType::absent) value += load(bias, n, params.bias);
  output[ulong(token + t) * params.N + n] = T(value);
}

// `tiles_per_band` tiles of tokens go through all tiles of rows together, so that these are read from the cache.
template <typename T, typename Reader, uint TileRows>
[[kernel]] void linear_tiles(device const T* x [[buffer(0)]], device const typename Reader::Data* weight [[buffer(1)]],
                             device const uchar* scale [[buffer(2)]], device const uchar* offset [[buffer(3)]],
                             device const T* bias [[buffer(4)]], device T* output [[buffer(5)]],
                             constant LinearParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint4 memory[TileRows * Reader::stride * sizeof(T) / sizeof(uint4)];
  threadgroup uint rows[TileRows];
  constexpr uint across = tile_fragments(TileRows), weight_rows = tile_weight_rows(TileRows);
  const uint weight_tiles = (params.N + weight_rows - 1) / weight_rows, together = params.tiles_per_band;
  const uint token = (group / (together * weight_tiles) * together + group % together) * TileRows;
  if (token >= params.T) return;  // the last ones may be fewer
  const uint count = min(TileRows, params.T - token);
  for (uint j = thread_index; j < count; j += kTileThreads) rows[j] = token + j;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint first = group / together % weight_tiles * weight_rows + first_of_lane<weight_rows>(thread_index);
  RowNumbers<across> numbers;
  for (uint n = 0; n < across; ++n) numbers.at[n] = min(first + n, params.N - 1);
  Products<TileRows> products;
  multiply_tile<TileRows, Reader>(products, memory, x, rows, count, params.wide_x,
                                  of_expert(weight, scale, offset, 0, params.weight), params.weight, numbers, params.H,
                                  thread_index);
  Floats<across> biases;
  load_biases(bias, 0, numbers, params.bias, biases);
  const uint column = fragment_element(thread_index % 32).column;
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
