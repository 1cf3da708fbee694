// The op experts for many slots, in four dispatches and without the host knowing which experts are chosen:
//
//   sort      order = the slots of [0, T * K) by expert, stable; expert e has [offsets[e], offsets[e + 1]) of them
//   gate_up   inner[i] = act(gate_up[expert] * x[token of order[i]] + gate_up_bias[expert])
//   down      slots[order[i]] = down[expert] * inner[i] + down_bias[expert]
//   combine   output[token] = sum_k weights[k] * slots[token, k] + sigmoid(shared_gate) * shared + residual
//
// The first and the last are in experts_slots.metal. Shapes are those of experts_decode.metal; order [T * K] and
// offsets [E + 1] are int, inner [T * K, I] and slots [T * K, H] float. Slots whose id lies outside [0, E) are in no
// expert's part of order, and combine leaves them out.
//
// gate_up and down multiply tiles of TileSlots slots by 64 rows of weights. Grid: one threadgroup per tile along x.
// Tiles of slots never span experts, and how many tiles an expert has is known on the device only: the grid has as many
// as there can be, each finds its own by the offsets, and those left over leave.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "experts.h"
#include "tiles.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ tiles

// Where this threadgroup works: slots [first, first + count) of the order, and a block of the expert's weight rows.
struct Tile {
  int expert;
  uint first, count, block;
};

// Bands of kBand tiles of slots walk all blocks together: the slots stay in the cache, and a weight that was read
// serves the whole band. False for a threadgroup that is left over.
template <uint TileSlots>
bool find_tile(thread Tile& tile, device const int* offsets, uint group, uint blocks, uint lane, uint experts) {
  uint index = group / (kBand * blocks) * kBand + group % kBand;
  tile.block = group / kBand % blocks;
  for (uint base = 0; base < experts; base += 32) {
    const uint expert = base + lane;
    const uint begin = expert < experts ? offsets[expert] : 0, end = expert < experts ? offsets[expert + 1] : 0;
    const uint tiles = (end - begin + TileSlots - 1) / TileSlots;
    const uint before = simd_prefix_exclusive_sum(tiles), all = simd_sum(tiles);
    if (index < all) {
      const bool mine = index >= before && index - before < tiles;
      const uint first = begin + (index - before) * TileSlots;
      tile.expert = simd_max(mine ? expert : 0);
      tile.first = simd_max(mine ? first : 0);
      tile.count = simd_max(mine ? min(TileSlots, end - first) : 0);
      return true;
    }
    index -= all;
  }
  return false;
}

// ------------------------------------------------------------------------------------------ gate_up, down

template <typename T, typename WeightTile, uint TileSlots>
[[kernel]] void experts_gate_up_tiles(device const T* x [[buffer(0)]], device const int* order [[buffer(1)]],
                                      device const int* offsets [[buffer(2)]],
                                      device const typename WeightTile::Data* gate_up [[buffer(3)]],
                                      device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                      device const T* bias [[buffer(6)]], device float* inner [[buffer(7)]],
                                      constant ExpertsParams& params [[buffer(8)]],
                                      uint group [[threadgroup_position_in_grid]],
                                      uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 memory[(TileSlots + kTileRows) * kStride / 4];
  threadgroup uint rows[TileSlots];
  threadgroup float* products = reinterpret_cast<threadgroup float*>(memory);
  const uint blocks = (params.I + kTileInner - 1) / kTileInner;
  Tile tile;
  if (!find_tile<TileSlots>(tile, offsets, group, blocks, thread_index % 32, params.E)) return;
  for (uint j = thread_index; j < TileSlots; j += kTileThreads) {
    rows[j] = j < tile.count ? uint(order[tile.first + j]) / params.K : kNoRow;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const RowTile weight_rows = gate_up_tile(tile.block, params);
  multiply_tile<TileSlots, WeightTile>(products, x, rows, params.wide_x,
                                       of_expert(gate_up, scale, offset, tile.expert, params.gate_up), params.gate_up,
                                       weight_rows, params.H, thread_index);
  for (uint i = thread_index; i < tile.count * kTileInner; i += kTileThreads) {
    const uint j = i / kTileInner, row = i % kTileInner, column = tile.block * kTileInner + row;
    if (column >= params.I) continue;
    inner[ulong(tile.first + j) * params.I + column] =
        inner_value(products + j * kProductStride, row, bias, tile.expert, tile.block, params);
  }
}

template <typename T, typename WeightTile, uint TileSlots>
[[kernel]] void experts_down_tiles(device const float* inner [[buffer(0)]], device const int* order [[buffer(1)]],
                                   device const int* offsets [[buffer(2)]],
                                   device const typename WeightTile::Data* down [[buffer(3)]],
                                   device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                   device const T* bias [[buffer(6)]], device float* slots [[buffer(7)]],
                                   constant ExpertsParams& params [[buffer(8)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 memory[(TileSlots + kTileRows) * kStride / 4];
  threadgroup uint rows[TileSlots];
  threadgroup float* products = reinterpret_cast<threadgroup float*>(memory);
  const uint blocks = (params.H + kTileRows - 1) / kTileRows;
  Tile tile;
  if (!find_tile<TileSlots>(tile, offsets, group, blocks, thread_index % 32, params.E)) return;
  for (uint j = thread_index; j < TileSlots; j += kTileThreads) rows[j] = j < tile.count ? tile.first + j : kNoRow;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const RowTile weight_rows = plain_tile(tile.block * kTileRows, params.H);
  multiply_tile<TileSlots, WeightTile>(products, inner, rows, params.I % Wide<float>::elements == 0,
                                       of_expert(down, scale, offset, tile.expert, params.down), params.down,
                                       weight_rows, params.I, thread_index);
  for (uint i = thread_index; i < tile.count * kTileRows; i += kTileThreads) {
    const uint j = i / kTileRows, row = i % kTileRows, h = tile.block * kTileRows + row;
    if (h >= params.H) continue;
    float value = products[j * kProductStride + row];
    if (params.down_bias != ParameterType::absent) {
      value += load(bias, ulong(tile.expert) * params.H + h, params.down_bias);
    }
    slots[ulong(order[tile.first + j]) * params.H + h] = value;
  }
}

}  // namespace moe_metal

// clang-format off
#define instantiate_tiles_of(dtype, rows)                                             \
  instantiate_kernel("experts_gate_up_tiles" #rows weights_suffix "_" #dtype,         \
                     moe_metal::experts_gate_up_tiles<dtype, weights_tile(dtype), rows>) \
  instantiate_kernel("experts_down_tiles" #rows weights_suffix "_" #dtype,            \
                     moe_metal::experts_down_tiles<dtype, weights_tile(dtype), rows>)
#define instantiate_tiles(dtype)  \
  instantiate_tiles_of(dtype, 16) \
  instantiate_tiles_of(dtype, 32) \
  instantiate_tiles_of(dtype, 64)

if_float(instantiate_tiles(float))
if_half(instantiate_tiles(half))
if_bfloat(instantiate_tiles(bfloat))
