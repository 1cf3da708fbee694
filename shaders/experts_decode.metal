// The op experts for few slots, in two dispatches that read the weights of an expert for each slot or few slots:
//
//   gate_up   inner[slot] = act(gate_up[expert] * x[token] + gate_up_bias[expert])
//   down      output[token] = sum_k weights[k] * (down[expert_k] * inner[slot_k] + down_bias[expert_k])
//                             + sigmoid(shared_gate) * shared + residual
//
// x, shared, residual, output [T, H]; weights, ids [T, K], whose T * K entries are the slots; gate_up [E, 2I, H] and
// down [E, H, I] in any format and layout, with scales and offsets as in `dequantize`; biases [E, 2I] and [E, H];
// inner [T * K, I]. inner is float: its size is 1/H of the weights that are read, and activated values may exceed the
// range of half. If down is packed, rows of inner are padded to whole chunks, and its elements are in the order in
// which down's lanes read them (packed_index in dots.h). gate_up may have a different format than down, so this is in
// params.
//
// Three files have kernels for these, named after how the work is divided:
//   experts_decode    _rows: lanes are along the columns of a few rows
//   experts_pairs     _rows2, for more than one token: weights are read and unpacked once for two slots of an expert
//   experts_columns   _columns: lanes are across the rows of a few columns, for transposed dense weights
// _wide: a lane loads 16 bytes of weights at a time; for packed weights, kPackedColumns columns.
// Grid: slots (gate_up) or tokens (down; of _rows2, pairs of tokens) along x, tiles of rows along y. With slots along
// x, slots of one expert read the same rows at about the same time, from the cache. WeightParams.parts simdgroups
// divide the columns of a row.
#include <metal_stdlib>
using namespace metal;

#include "experts_decode.h"

namespace moe_metal {

template <typename T, typename Chunk>
[[kernel]] void experts_gate_up_rows(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                     device const typename Chunk::Data* gate_up [[buffer(2)]],
                                     device const uchar* scale [[buffer(3)]], device const uchar* offset [[buffer(4)]],
                                     device const T* bias [[buffer(5)]], device float* inner [[buffer(6)]],
                                     constant ExpertsParams& params [[buffer(7)]],
                                     uint2 group [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]],
                                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[most_partial<Chunk>()];
  const uint slot = group.x;
  if (slot >= params.T * params.K) return;
  const int2 id = id_of(ids, slot, params);  // is loaded while the positions are computed
  device const T* vector = x + ulong(slot / params.K) * params.H;
  const uint parts = params.gate_up.parts, tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts) / 2;
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kInnerRows;
  DotRows<typename Chunk::At> rows = {};
  rows.gap = params.gate_up.gap;
  for (uint r = 0; r < kDotRows; ++r) {  // gate, up, gate, up; the last row is repeated past the end
    set_row<Chunk>(rows, r, gate_up_row(min(first + r / 2, params.I - 1), r % 2, params), params.gate_up);
  }
  const int expert = expert_of(id, params);
  if (expert < 0) return;
  if (first < params.I) {
    add_rows<Chunk>(rows, vector, of_expert(gate_up, scale, offset, expert, params.gate_up), params.gate_up, params.H,
                    position, parts);
  }
  store_partial<Chunk>(rows, partial, thread_index);
  if (thread_index >= tile_rows || begin + thread_index >= params.I) return;
  const uint tile = thread_index / kInnerRows, r = thread_index % kInnerRows * 2;
  const float gate = sum_of_parts<Chunk>(partial, tile, parts, r),
              up = sum_of_parts<Chunk>(partial, tile, parts, r + 1);
  const uint i = begin + thread_index;
  inner[inner_at(slot, i, params)] = inner_value(gate, up, bias, expert, i, params);
}

template <typename T, typename Chunk>
[[kernel]] void experts_down_rows(
    device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]], device const T* weights [[buffer(2)]],
    device const typename Chunk::Data* down [[buffer(3)]], device const uchar* scale [[buffer(4)]],
    device const uchar* offset [[buffer(5)]], device const T* bias [[buffer(6)]], device const T* shared [[buffer(7)]],
    device const T* shared_gate [[buffer(8)]], device const T* residual [[buffer(9)]], device T* output [[buffer(10)]],
    constant ExpertsParams& params [[buffer(11)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[most_partial<Chunk>()];
  const uint token = group.x, parts = params.down.parts, tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts);
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kDotRows;
  if (token >= params.T) return;
  DotRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kDotRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.H - 1), params.down);
  // The columns of all experts' rows form one sequence of chunks. Each lane takes every (parts * takers)-th of them, or
  // all lanes of a tile together take every parts-th step.
  constexpr uint takers = Chunk::per_lane ? Chunk::lanes : 1, take = Chunk::step / takers;
  const uint takes = (params.I + take - 1) / take, taker = position.part * takers + position.lane % takers;
  const uint all = first < params.H ? params.K * takes : 0, step = parts * takers;
  // The next id is loaded before this expert's weights, so that its latency is hidden.
  ulong slot = 0, next_slot = ulong(token) * params.K + taker / takes;
  int2 next_id = taker < all ? id_of(ids, next_slot, params) : int2(-1);
  for (uint i = taker; i < all; i += step) {
    slot = next_slot;
    const int expert = expert_of(next_id, params);
    next_slot = ulong(token) * params.K + (i + step) / takes;
    if (i + step < all) next_id = id_of(ids, next_slot, params);
    const uint column = i % takes * take + (Chunk::per_lane ? 0 : position.lane * Chunk::apart);
    if (expert < 0 || column >= params.I) continue;
    Chunk::template add<true>(rows, load(weights, slot, params.weights), inner + slot * params.inner_length,
                              of_expert(down, scale, offset, expert, params.down), params.down, params.I, column);
  }
  store_partial<Chunk>(rows, partial, thread_index);
  const uint h = begin + thread_index;
  if (thread_index >= tile_rows || h >= params.H) return;
  const float total = sum_of_parts<Chunk>(partial, thread_index / kDotRows, parts, thread_index % kDotRows) +
                      weighted_bias(bias, ids, weights, token, h, params);
  output[ulong(token) * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

}  // namespace moe_metal

// clang-format off
#define instantiate_rows(dtype, suffix, read)                                 \
  instantiate_kernel("experts_gate_up_rows" suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_gate_up_rows<dtype, read##_chunk(dtype)>) \
  instantiate_kernel("experts_down_rows" suffix weights_suffix "_" #dtype,    \
                     moe_metal::experts_down_rows<dtype, read##_chunk(dtype)>)
#if in_part(rows_wide)
for_dtypes(instantiate_rows, "_wide", wide)
#endif
#if in_part(rows)
for_dtypes(instantiate_rows, "", any)
#endif
