// The op experts for many slots, in four dispatches. The host does not know which experts are selected.
//
//   sort      order = the slots in [0, T * K) sorted by expert, stable; tiles = the tiles of each expert
//   gate_up   inner[i] = act(gate_up[expert] * x[token of order[i]] + gate_up_bias[expert])
//   down      slots[order[i]] = down[expert] * inner[i] + down_bias[expert]
//   combine   output[token] = sum_k weights[k] * slots[token, k] + sigmoid(shared_gate) * shared + residual
//
// The first and the last are in experts_slots.metal. Shapes are as in experts_decode.metal; order [T * K] is int,
// inner [T * K, I] and slots [T * K, H] are float. Slots with an id outside [0, E) belong to no expert in `order`, and
// combine skips them.
//
// gate_up and down multiply tiles of up to TileRows slots by tile_weight_rows rows of weights. A tile never has slots
// of two experts. Only the device knows how many tiles an expert has, so the list `tiles` (expert, first in order,
// count) has the largest possible number of entries; unused ones have no slots. Grid: one threadgroup for each entry
// (or half of one) and tile of weight rows, along x.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "experts.h"
#include "tiles.h"

namespace moe_metal {

// The work of a threadgroup: slots [first, first + count) of the order, and one tile of the expert's weight rows.
struct Tile {
  uint expert, first, count, weight_tile;
};

// `tiles_per_band` tiles of slots go through all tiles of weights together: the slots stay in the cache, and so do the
// weights until the last of these tiles has read them. `down` divides listed tiles of 64 slots into two of 32: its
// slots are float, and with 64 slots each would be read twice as often from threadgroup memory, since simdgroups would
// have half the rows of weights.
template <uint TileRows>
Tile tile_of(device const int4* tiles, uint group, uint weight_tiles, constant ExpertsParams& params) {
  const uint of_entry = params.tile_rows / TileRows, together = params.tiles_per_band;
  const uint index = group / (together * weight_tiles) * together + group % together;
  Tile tile = {};
  tile.weight_tile = group / together % weight_tiles;
  if (index / of_entry >= params.tiles) return tile;
  const int4 entry = tiles[index / of_entry];
  const uint done = index % of_entry * TileRows;
  tile.expert = entry.x;
  tile.first = entry.y + done;
  tile.count = uint(entry.z) > done ? min(TileRows, uint(entry.z) - done) : 0;
  return tile;
}

// ------------------------------------------------------------------------------------------ gate_up, down

// Removes a lane's first pair of gate and up, so that the next pair becomes the first: registers can only be indexed by
// constants. Pairs are ordered by slot.
template <uint TileRows>
void take_pair(thread Products<TileRows>& products) {
  constexpr uint pairs = tile_fragments(TileRows) / 2;
#pragma unroll
  for (uint i = 1; i < 2 * products.down * pairs; ++i) {
    const uint slot = i / pairs, n = i % pairs * 2, to_slot = (i - 1) / pairs, to = (i - 1) % pairs * 2;
    products.at[to_slot / 2][to][to_slot % 2] = products.at[slot / 2][n][slot % 2];
    products.at[to_slot / 2][to + 1][to_slot % 2] = products.at[slot / 2][n + 1][slot % 2];
  }
}

template <typename T, typename Reader, uint TileRows>
[[kernel]] void experts_gate_up_tiles(device const T* x [[buffer(0)]], device const int* order [[buffer(1)]],
                                      device const int4* tiles [[buffer(2)]],
                                      device const typename Reader::Data* gate_up [[buffer(3)]],
                                      device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                      device const T* bias [[buffer(6)]], device float* inner [[buffer(7)]],
                                      constant ExpertsParams& params [[buffer(8)]],
                                      uint group [[threadgroup_position_in_grid]],
                                      uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint4 memory[TileRows * Reader::stride * sizeof(T) / sizeof(uint4)];
  threadgroup uint rows[TileRows];
  constexpr uint across = tile_fragments(TileRows), tile_inner = tile_weight_rows(TileRows) / 2;
  const Tile tile = tile_of<TileRows>(tiles, group, (params.I + tile_inner - 1) / tile_inner, params);
  if (tile.count == 0) return;
  for (uint j = thread_index; j < tile.count; j += kTileThreads) {
    rows[j] = uint(order[tile.first + j]) / params.K;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Gate, up, gate, up: a lane has both factors of an inner element. The last row is repeated past the end.
  const uint first = tile.weight_tile * tile_inner + first_of_lane<tile_inner>(thread_index);
  RowNumbers<across> numbers;
  RowNumbers<across> of_biases;
  for (uint n = 0; n < across; ++n) {
    const uint i = min(first + n / 2, params.I - 1);
    numbers.at[n] = gate_up_row(i, n % 2, params);
    of_biases.at[n] = i * params.bias_stride + n % 2 * params.up_bias_offset;
  }
  Products<TileRows> products;
  multiply_tile<TileRows, Reader>(products, memory, x, rows, tile.count, params.wide_x,
                                  of_expert(gate_up, scale, offset, tile.expert, params.gate_up), params.gate_up,
                                  numbers, params.H, thread_index);
  Floats<across> biases;
  load_biases(bias, ulong(tile.expert) * 2 * params.I, of_biases, params.gate_up_bias, biases);
#pragma unroll
  for (uint i = 0; i < products.down * across; ++i) products.at[i / across][i % across] += biases.at[i % across];
  const uint column = fragment_element(thread_index % 32).column, pairs = across / 2;
  // Not unrolled: otherwise most of the kernel would be five activations for each of a lane's elements.
#pragma clang loop unroll(disable)
  for (uint i = 0; i < 2 * products.down * pairs; ++i) {
    const uint slot = i / pairs, row = first + i % pairs, j = slot / 2 * 8 + column + slot % 2;
    if (j < tile.count && row < params.I) {
      const float gate = products.at[0][0].x, up = products.at[0][1].x;
      inner[ulong(tile.first + j) * params.I + row] = activated(gate, up, params.activation);
    }
    take_pair(products);
  }
}

template <typename T, typename Reader, uint TileRows>
[[kernel]] void experts_down_tiles(device const float* inner [[buffer(0)]], device const int* order [[buffer(1)]],
                                   device const int4* tiles [[buffer(2)]],
                                   device const typename Reader::Data* down [[buffer(3)]],
                                   device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                   device const T* bias [[buffer(6)]], device float* slots [[buffer(7)]],
                                   constant ExpertsParams& params [[buffer(8)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint4 memory[TileRows * Reader::stride * sizeof(float) / sizeof(uint4)];
  threadgroup uint rows[TileRows];
  constexpr uint across = tile_fragments(TileRows), weight_rows = tile_weight_rows(TileRows);
  const Tile tile = tile_of<TileRows>(tiles, group, (params.H + weight_rows - 1) / weight_rows, params);
  if (tile.count == 0) return;
  for (uint j = thread_index; j < tile.count; j += kTileThreads) rows[j] = tile.first + j;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint first = tile.weight_tile * weight_rows + first_of_lane<weight_rows>(thread_index);
  RowNumbers<across> numbers;
  for (uint n = 0; n < across; ++n) numbers.at[n] = min(first + n, params.H - 1);
  Products<TileRows> products;
  multiply_tile<TileRows, Reader>(products, memory, inner, rows, tile.count, params.I % Wide<float>::elements == 0,
                                  of_expert(down, scale, offset, tile.expert, params.down), params.down, numbers,
                                  params.I, thread_index);
  Floats<across> biases;
  load_biases(bias, ulong(tile.expert) * params.H, numbers, params.down_bias, biases);
  const uint column = fragment_element(thread_index % 32).column;
#pragma unroll
  for (uint i = 0; i < 2 * products.down; ++i) {
    const uint j = i / 2 * 8 + column + i % 2;
    if (j >= tile.count) continue;
    device float* to = slots + ulong(order[tile.first + j]) * params.H;
    for (uint n = 0; n < across; ++n) {
      if (first + n < params.H) to[first + n] = products.at[i / 2][n][i % 2] + biases.at[n];
    }
  }
}

}  // namespace moe_metal

// clang-format off
#define instantiate_gate_up(dtype, suffix, read, rows)                               \
  instantiate_kernel("experts_gate_up_tiles" #rows suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_gate_up_tiles<dtype, read##_tile(dtype), rows>)
#define instantiate_both(dtype, suffix, read, rows)                               \
  instantiate_gate_up(dtype, suffix, read, rows)                                  \
  instantiate_kernel("experts_down_tiles" #rows suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_down_tiles<dtype, read##_tile(dtype), rows>)

#if in_part(tiles16)
for_dtypes(instantiate_both, "", any, 16)
#endif
#if in_part(tiles32)
for_dtypes(instantiate_both, "", any, 32)
#endif
#if in_part(tiles64)
for_dtypes(instantiate_gate_up, "", any, 64)
#endif
#if in_part(tiles16_wide)
for_dtypes(instantiate_both, "_wide", wide, 16)
#endif
#if in_part(tiles32_wide)
for_dtypes(instantiate_both, "_wide", wide, 32)
#endif
#if in_part(tiles64_wide)
for_dtypes(instantiate_gate_up, "_wide", wide, 64)
#endif
