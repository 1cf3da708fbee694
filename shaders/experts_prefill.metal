// The op experts for many slots, in four dispatches and without the host knowing which experts are chosen:
//
//   sort      order = the slots of [0, T * K) by expert, stable; expert e has [offsets[e], offsets[e + 1]) of them
//   gate_up   inner[i] = act(gate_up[expert] * x[token of order[i]] + gate_up_bias[expert])
//   down      slots[order[i]] = down[expert] * inner[i] + down_bias[expert]
//   combine   output[token] = sum_k weights[k] * slots[token, k] + sigmoid(shared_gate) * shared + residual
//
// Shapes are those of experts_decode.metal; order [T * K] and offsets [E + 1] are int, inner [T * K, I] and slots
// [T * K, H] float. Slots whose id lies outside [0, E) are in no expert's part of order, and combine leaves them out.
//
// gate_up and down multiply tiles of TileSlots slots by 64 rows of weights. Grid: one threadgroup per tile along x.
// Tiles of slots never span experts, and how many tiles an expert has is known on the device only: the grid has as many
// as there can be, each finds its own by the offsets, and those left over leave.
//
// Operands are staged as float: that holds every half and bfloat, inner is float, no half overflows, M1 and M2 have no
// bfloat arithmetic, and simdgroup_matrix multiplies float about as fast as half on the GPUs before M5.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "experts.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ sort

// Grid: one threadgroup per expert. Each reads all ids, and counts those of lower experts to find where its own begin:
// E times the reads of a radix sort, from the cache, but one dispatch, no atomics and no order between threadgroups.
[[host_name("experts_sort")]] [[kernel]] void experts_sort(
    device const int* ids [[buffer(0)]], device int* order [[buffer(1)]], device int* offsets [[buffer(2)]],
    constant ExpertsParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup uint lowers[kMaxSimdgroups], owns[kMaxSimdgroups];
  if (group >= params.E) return;
  const int expert = group;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, slots = params.T * params.K;
  // Each simdgroup has slots that follow one another, 32 at a time, so that the order stays stable.
  const uint steps = (slots + 32 * simdgroups - 1) / (32 * simdgroups), first = simdgroup * steps * 32;
  uint lower = 0, own = 0;
  for (uint i = 0; i < steps; ++i) {
    const uint slot = first + i * 32 + lane;
    const int id = slot < slots ? expert_of(ids, slot, params) : -1;
    lower += id >= 0 && id < expert ? 1 : 0;
    own += id == expert ? 1 : 0;
  }
  lower = simd_sum(lower);
  own = simd_sum(own);
  if (lane == 0) {
    lowers[simdgroup] = lower;
    owns[simdgroup] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint begin = simd_sum(lane < simdgroups ? lowers[lane] : 0);
  const uint before = simd_sum(lane < simdgroup ? owns[lane] : 0);
  if (thread_index == 0) offsets[expert] = begin;
  if (uint(expert) == params.E - 1 && simdgroup == simdgroups - 1 && lane == 0)
    offsets[params.E] = begin + before + own;
  if (own == 0) return;
  uint next = begin + before;
  for (uint i = 0; i < steps; ++i) {
    const uint slot = first + i * 32 + lane;
    const uint here = slot < slots && expert_of(ids, slot, params) == expert ? 1 : 0;
    const uint rank = simd_prefix_exclusive_sum(here);
    if (here) order[next + rank] = slot;
    next += simd_sum(here);
  }
}

// ------------------------------------------------------------------------------------------ tiles

MOE_METAL_CONSTANT uint kDepth = 32;           // columns staged at a time
MOE_METAL_CONSTANT uint kStride = kDepth + 4;  // of a staged row: 4 more keep lanes off each other's banks
MOE_METAL_CONSTANT uint kProductStride = kTileRows + 4;
MOE_METAL_CONSTANT uint kNoRow = 0xffffffff;

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

// Threads share `count` pieces. The number of turns is a constant, so that loops unroll and their loads overlap.
constexpr uint turns(uint count) { return (count + kTileThreads - 1) / kTileThreads; }

// memory[j][c] = element (rows[j], column + c) of a matrix with rows of `length`; 0 where there is none.
template <uint TileSlots, typename A>
void stage_slots(threadgroup float* memory, device const A* matrix, threadgroup const uint* rows, bool wide,
                 uint length, uint column, uint thread_index) {
  constexpr uint loads = kDepth / Wide<A>::elements, count = TileSlots * loads;
  for (uint turn = 0; wide && turn < turns(count); ++turn) {
    const uint i = turn * kTileThreads + thread_index, j = i / loads, c = i % loads * Wide<A>::elements;
    if (count % kTileThreads != 0 && i >= count) break;
    typename Wide<A>::Values values = {};
    if (rows[j] != kNoRow && column + c < length) load_wide(matrix + ulong(rows[j]) * length + column + c, values);
    for (uint n = 0; n < Wide<A>::vectors; ++n) {
      reinterpret_cast<threadgroup float4*>(memory + j * kStride + c)[n] = values.at[n];
    }
  }
  for (uint i = thread_index; !wide && i < TileSlots * kDepth; i += kTileThreads) {
    const uint j = i / kDepth, c = i % kDepth;
    const bool inside = rows[j] != kNoRow && column + c < length;
    memory[j * kStride + c] = inside ? float(matrix[ulong(rows[j]) * length + column + c]) : 0;
  }
}

// memory[j][c] = element (j, column + c) of the tile's rows; 0 where there is none. Neighbouring threads load
// neighbours.
template <typename T>
void stage_weights(threadgroup float* memory, thread const RowTile<T>& rows, WeightLayout layout, uint length,
                   uint column, uint thread_index) {
  constexpr uint elements = Wide<T>::elements, along = kDepth / elements, across = kTileRows / elements;
  const bool wide = layout == WeightLayout::rows_wide || layout == WeightLayout::columns_wide;
  const bool by_rows = layout == WeightLayout::rows_wide || layout == WeightLayout::rows;
  for (uint turn = 0; wide && turn < turns(kTileRows * along); ++turn) {
    const uint i = turn * kTileThreads + thread_index;
    const uint j = by_rows ? i / along : i % across * elements, c = by_rows ? i % along * elements : i / across;
    typename Wide<T>::Values values = {};
    if (rows.has(j) && column + c < length) load_wide(rows.at(j, column + c), values);
    for (uint n = 0; n < Wide<T>::vectors; ++n) {
      if (by_rows) {
        reinterpret_cast<threadgroup float4*>(memory + j * kStride + c)[n] = values.at[n];
        continue;
      }
      for (uint m = 0; m < 4; ++m) memory[(j + 4 * n + m) * kStride + c] = values.at[n][m];
    }
  }
  for (uint i = thread_index; !wide && i < kTileRows * kDepth; i += kTileThreads) {
    const uint j = by_rows ? i / kDepth : i % kTileRows, c = by_rows ? i % kDepth : i / kTileRows;
    memory[j * kStride + c] = rows.has(j) && column + c < length ? float(*rows.at(j, column + c)) : 0;
  }
}

// The product of TileSlots slots with 64 rows of weights, [TileSlots][kProductStride] in memory. Each of four
// simdgroups has 16 columns of it, or with 64 slots a quarter of 32 by 32.
template <uint TileSlots, typename A, typename T>
void multiply_tile(threadgroup float* memory, device const A* matrix, threadgroup const uint* rows, bool wide,
                   thread const RowTile<T>& weights, WeightLayout layout, uint length, uint thread_index) {
  constexpr uint across = TileSlots == 64 ? 2 : 4, down = 4 / across;   // simdgroups
  constexpr uint M = TileSlots / down / 8, N = kTileRows / across / 8;  // matrices of each
  const uint simdgroup = thread_index / 32;
  const uint row = simdgroup / across * M * 8, col = simdgroup % across * N * 8;
  threadgroup float* staged_weights = memory + TileSlots * kStride;
  // Matrices live in registers only where every index is a constant, hence the pragmas.
  simdgroup_float8x8 sums[M][N];
#pragma unroll
  for (uint i = 0; i < M * N; ++i) sums[i / N][i % N] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint column = 0; column < length; column += kDepth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_slots<TileSlots>(memory, matrix, rows, wide, length, column, thread_index);
    stage_weights(staged_weights, weights, layout, length, column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < kDepth; k += 8) {
      simdgroup_float8x8 a[M], b[N];
#pragma unroll
      for (uint m = 0; m < M; ++m) simdgroup_load(a[m], memory + (row + m * 8) * kStride + k, kStride);
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        simdgroup_load(b[n], staged_weights + (col + n * 8) * kStride + k, kStride, ulong2(0), true);
      }
#pragma unroll
      for (uint i = 0; i < M * N; ++i) {
        simdgroup_multiply_accumulate(sums[i / N][i % N], a[i / N], b[i % N], sums[i / N][i % N]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < M * N; ++i) {
    threadgroup float* at = memory + (row + i / N * 8) * kProductStride + col + i % N * 8;
    simdgroup_store(sums[i / N][i % N], at, kProductStride);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// ------------------------------------------------------------------------------------------ gate_up, down

template <typename T, uint TileSlots>
[[kernel]] void experts_gate_up_tiles(device const T* x [[buffer(0)]], device const int* order [[buffer(1)]],
                                      device const int* offsets [[buffer(2)]], device const T* gate_up [[buffer(3)]],
                                      device const T* bias [[buffer(4)]], device float* inner [[buffer(5)]],
                                      constant ExpertsParams& params [[buffer(6)]],
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
  const RowTile<T> weights = gate_up_tile(gate_up, tile.expert, tile.block, params);
  multiply_tile<TileSlots>(products, x, rows, params.wide_x, weights, params.gate_up.layout, params.H, thread_index);
  for (uint i = thread_index; i < tile.count * kTileInner; i += kTileThreads) {
    const uint j = i / kTileInner, row = i % kTileInner, column = tile.block * kTileInner + row;
    if (column >= params.I) continue;
    inner[ulong(tile.first + j) * params.I + column] =
        inner_value(products + j * kProductStride, row, bias, tile.expert, tile.block, params);
  }
}

template <typename T, uint TileSlots>
[[kernel]] void experts_down_tiles(device const float* inner [[buffer(0)]], device const int* order [[buffer(1)]],
                                   device const int* offsets [[buffer(2)]], device const T* down [[buffer(3)]],
                                   device const T* bias [[buffer(4)]], device float* slots [[buffer(5)]],
                                   constant ExpertsParams& params [[buffer(6)]],
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
  const RowTile<T> weights = down_tile(down, tile.expert, tile.block * kTileRows, params);
  multiply_tile<TileSlots>(products, inner, rows, params.I % Wide<float>::elements == 0, weights, params.down.layout,
                           params.I, thread_index);
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

// ------------------------------------------------------------------------------------------ combine

// Grid: tokens along x, their elements along y, one per thread.
template <typename T>
[[kernel]] void experts_combine(device const float* slots [[buffer(0)]], device const int* ids [[buffer(1)]],
                                device const T* weights [[buffer(2)]], device const T* shared [[buffer(3)]],
                                device const T* shared_gate [[buffer(4)]], device const T* residual [[buffer(5)]],
                                device T* output [[buffer(6)]], constant ExpertsParams& params [[buffer(7)]],
                                uint2 group [[threadgroup_position_in_grid]],
                                uint thread_index [[thread_index_in_threadgroup]],
                                uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint h = group.y * simdgroups * 32 + thread_index;
  if (group.x >= params.T || h >= params.H) return;
  const ulong token = group.x;
  float total = 0;
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = token * params.K + k;
    if (expert_of(ids, slot, params) < 0) continue;
    total += load(weights, slot, params.weights) * slots[slot * params.H + h];
  }
  output[token * params.H + h] = T(total + beside_experts(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#define instantiate_tiles_of(dtype, rows)                                                                             \
  instantiate_kernel("experts_gate_up_tiles" #rows "_" #dtype, moe_metal::experts_gate_up_tiles<dtype, rows>)         \
  instantiate_kernel("experts_down_tiles" #rows "_" #dtype, moe_metal::experts_down_tiles<dtype, rows>)
#define instantiate_tiles(dtype)  \
  instantiate_tiles_of(dtype, 16) \
  instantiate_tiles_of(dtype, 32) \
  instantiate_tiles_of(dtype, 64)

instantiate_tiles(float)
instantiate_tiles(half)
instantiate_tiles(bfloat)
instantiate_dtypes("experts_combine", experts_combine)
