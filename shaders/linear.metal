// The op linear, in one dispatch: output[t] = weight * x[t] + bias, with a weight in any format.
//
// x [T, H], weight [N, H], bias [N], output [T, N].
//
// _rows, for few tokens: every token reads the weight. Grid: tokens along x, so that those of one block of rows read it
// at about the same time, from the cache; blocks of rows along y. WeightParams.split simdgroups share the work on a
// row. _tiles, for many: tiles of TileRows tokens by 64 rows of the weight, one threadgroup each, along x.
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
                            uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[most_shares<Chunk>()];
  const uint token = group.x, split = params.weight.split, block_rows = rows_of_threadgroup<Chunk>(split);
  if (token >= params.T) return;
  const Place place = place_of<Chunk>(thread_index, split);
  const uint block = group.y * block_rows, first = block + place.team * kChunkRows;
  ChunkRows rows = {};
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

// Bands of at most kBand tiles of tokens walk all blocks of rows together: a weight that was read serves the band.
template <typename T, typename WeightTile, uint TileRows>
[[kernel]] void linear_tiles(device const T* x [[buffer(0)]],
                             device const typename WeightTile::Data* weight [[buffer(1)]],
                             device const uchar* scale [[buffer(2)]], device const uchar* offset [[buffer(3)]],
                             device const T* bias [[buffer(4)]], device T* output [[buffer(5)]],
                             constant LinearParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 memory[(TileRows + kTileRows) * kStride / 4];
  threadgroup uint rows[TileRows];
  threadgroup float* products = reinterpret_cast<threadgroup float*>(memory);
  const uint blocks = (params.N + kTileRows - 1) / kTileRows, band = min(kBand, (params.T + TileRows - 1) / TileRows);
  const uint first = (group / (band * blocks) * band + group % band) * TileRows;
  const uint block = group / band % blocks * kTileRows;
  if (first >= params.T) return;  // the last band may have fewer tiles
  for (uint j = thread_index; j < TileRows; j += kTileThreads) rows[j] = first + j < params.T ? first + j : kNoRow;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const RowTile weight_rows = plain_tile(block, params.N);
  multiply_tile<TileRows, WeightTile>(products, x, rows, params.wide_x,
                                      of_expert(weight, scale, offset, 0, params.weight), params.weight, weight_rows,
                                      params.H, thread_index);
  for (uint i = thread_index; i < TileRows * kTileRows; i += kTileThreads) {
    const uint j = i / kTileRows, n = block + i % kTileRows;
    if (first + j >= params.T || n >= params.N) continue;
    float value = products[j * kProductStride + i % kTileRows];
    if (params.bias != ParameterType::absent) value += load(bias, n, params.bias);
    output[ulong(first + j) * params.N + n] = T(value);
  }
}

}  // namespace moe_metal

// clang-format off
#define instantiate_linear(dtype)                                                                                  \
  instantiate_kernel("linear_rows_wide" weights_suffix "_" #dtype, moe_metal::linear_rows<dtype, wide_chunk(dtype)>) \
  instantiate_kernel("linear_rows" weights_suffix "_" #dtype, moe_metal::linear_rows<dtype, any_chunk(dtype)>)       \
  instantiate_kernel("linear_tiles16" weights_suffix "_" #dtype,                                                     \
                     moe_metal::linear_tiles<dtype, weights_tile(dtype), 16>)                                        \
  instantiate_kernel("linear_tiles32" weights_suffix "_" #dtype,                                                     \
                     moe_metal::linear_tiles<dtype, weights_tile(dtype), 32>)                                        \
  instantiate_kernel("linear_tiles64" weights_suffix "_" #dtype,                                                     \
                     moe_metal::linear_tiles<dtype, weights_tile(dtype), 64>)

if_float(instantiate_linear(float))
if_half(instantiate_linear(half))
if_bfloat(instantiate_linear(bfloat))
