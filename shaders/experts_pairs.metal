// The op experts for few slots, two slots of an expert together; experts_decode.metal describes the tensors and the
// grid.
#include <metal_stdlib>
using namespace metal;

#include "experts_decode.h"

namespace moe_metal {

// The lanes of which the condition is true, as bits.
inline uint lanes_where(bool condition) { return uint(ulong(simd_vote::vote_t(simd_ballot(condition)))); }

// Slots with the same id form pairs, in ascending order.
struct Pair {
  bool begins;  // with this slot
  uint second;  // this slot, if there is no other
};
// The pair of a slot. Each simdgroup searches all ids.
inline Pair pair_of(uint slot, int2 id, device const int* ids, uint lane, constant ExpertsParams& params) {
  constexpr uint loads = 4;  // in flight together
  const uint slots = params.T * params.K;
  uint before = 0, second = slot;
  for (uint first = 0; first < slots; first += loads * kSimdgroup) {
    int2 all[loads];
#pragma unroll
    for (uint n = 0; n < loads; ++n) all[n] = id_of(ids, min(first + n * kSimdgroup + lane, slots - 1), params);
#pragma unroll
    for (uint n = 0; n < loads; ++n) {
      const uint begin = first + n * kSimdgroup, other = begin + lane;
      const bool same = other < slots && all[n].x == id.x && all[n].y == id.y;
      const uint later = lanes_where(same && other > slot);
      before += popcount(lanes_where(same && other < slot));
      if (second == slot && later != 0) second = begin + ctz(later);
    }
  }
  const Pair pair = {before % 2 == 0, second};
  return pair;
}

template <typename T, typename Chunk>
[[kernel]] void experts_gate_up_rows2(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                      device const typename Chunk::Data* gate_up [[buffer(2)]],
                                      device const uchar* scale [[buffer(3)]], device const uchar* offset [[buffer(4)]],
                                      device const T* bias [[buffer(5)]], device float* inner [[buffer(6)]],
                                      constant ExpertsParams& params [[buffer(7)]],
                                      uint2 group [[threadgroup_position_in_grid]],
                                      uint thread_index [[thread_index_in_threadgroup]],
                                      uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[2 * most_partial<Chunk>()];
  if (group.x >= params.T * params.K) return;
  const int2 id = id_of(ids, group.x, params);
  const uint parts = params.gate_up.parts, tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts) / 2;
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kInnerRows;
  DotRows<typename Chunk::At> rows = {};
  rows.gap = params.gate_up.gap;
  for (uint r = 0; r < kDotRows; ++r) {
    set_row<Chunk>(rows, r, gate_up_row(min(first + r / 2, params.I - 1), r % 2, params), params.gate_up);
  }
  const Pair pair = pair_of(group.x, id, ids, position.lane, params);
  const int expert = expert_of(id, params);
  if (expert < 0 || !pair.begins) return;
  const uint slots = pair.second == group.x ? 1 : 2;
  const Weights<typename Chunk::Data> weights = of_expert(gate_up, scale, offset, expert, params.gate_up);
  SeveralSums<2> sums = {};
  if (first < params.I && slots == 1) {
    const SeveralVectors<T, 1> vector = {x, params.H, {group.x / params.K}};
    sums.of[0] = several_sums<Chunk>(rows, vector, weights, params.gate_up, params.H, position, parts).of[0];
  } else if (first < params.I) {
    const SeveralVectors<T, 2> vectors = {x, params.H, {group.x / params.K, pair.second / params.K}};
    sums = several_sums<Chunk>(rows, vectors, weights, params.gate_up, params.H, position, parts);
  }
#pragma unroll
  for (uint n = 0; n < 2; ++n) store_partial<Chunk>(sums.of[n].at, partial + n * most_partial<Chunk>(), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint which = thread_index / tile_rows, row = thread_index % tile_rows, i = begin + row;
  if (which >= slots || i >= params.I) return;
  threadgroup const float* own = partial + which * most_partial<Chunk>();
  const uint tile = row / kInnerRows, r = row % kInnerRows * 2;
  const float gate = sum_of_parts<Chunk>(own, tile, parts, r), up = sum_of_parts<Chunk>(own, tile, parts, r + 1);
  const uint slot = which == 0 ? group.x : pair.second;
  inner[inner_at(slot, i, params)] = inner_value(gate, up, bias, expert, i, params);
}

// Slots of one expert in two tokens, at most one of each token: bit j is slot j, counted from the first token's first.
struct Selected {
  uint slots;
  int expert;
};
// The bits of a token's slots.
inline uint slots_of(uint slots, uint token, constant ExpertsParams& params) {
  return slots >> token * params.K & ((1u << params.K) - 1);
}

// Lists the experts of `slots` slots, at most 32. If a token has selected an expert again, that slot is listed alone.
// Each simdgroup computes the list. -> its length; the caller waits before it reads the list
inline uint list_experts(threadgroup Selected* list, device const int* ids, ulong first, uint slots, uint thread_index,
                         constant ExpertsParams& params) {
  const uint lane = thread_index % kSimdgroup, below = (1u << lane) - 1;
  const int expert = lane < slots ? expert_of(ids, first + lane, params) : -1;
  uint same = 0, listed = 0;
  for (uint j = 0; j < slots; ++j) same |= simd_shuffle(expert, ushort(j)) == expert ? 1u << j : 0;
  for (uint t = 0; t < 2; ++t) {
    const uint own = slots_of(same, t, params), lowest = own & (~own + 1);
    listed |= lowest << t * params.K;
  }
  const bool again = (listed >> lane & 1) == 0;
  if (again) listed = 1u << lane;
  const bool leads = expert >= 0 && (listed & below) == 0;
  const uint leaders = lanes_where(leads);
  if (leads && thread_index < kSimdgroup) list[popcount(leaders & below)] = {listed, expert};
  return popcount(leaders);
}

// Each threadgroup has two tokens, the last one may have one.
template <typename T, typename Chunk>
[[kernel]] void experts_down_rows2(
    device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]], device const T* weights [[buffer(2)]],
    device const typename Chunk::Data* down [[buffer(3)]], device const uchar* scale [[buffer(4)]],
    device const uchar* offset [[buffer(5)]], device const T* bias [[buffer(6)]], device const T* shared [[buffer(7)]],
    device const T* shared_gate [[buffer(8)]], device const T* residual [[buffer(9)]], device T* output [[buffer(10)]],
    constant ExpertsParams& params [[buffer(11)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[2 * most_partial<Chunk>()];
  threadgroup Selected list[kSimdgroup];
  const uint token = group.x * 2;
  if (token >= params.T) return;
  const uint tokens = min(2u, params.T - token), parts = params.down.parts;
  const uint tile_rows = rows_of_threadgroup<Chunk>(simdgroups, parts);
  const ulong first_slot = ulong(token) * params.K;
  const uint experts = list_experts(list, ids, first_slot, tokens * params.K, thread_index, params);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Position position = position_of<Chunk>(thread_index, parts);
  const uint begin = group.y * tile_rows, first = begin + position.tile * kDotRows;
  DotRows<typename Chunk::At> rows = {};
  for (uint r = 0; r < kDotRows; ++r) set_row<Chunk>(rows, r, min(first + r, params.H - 1), params.down);
  // One sequence of chunks, as for one token.
  constexpr uint takers = Chunk::per_lane ? Chunk::lanes : 1, take = Chunk::step / takers;
  const uint takes = (params.I + take - 1) / take, taker = position.part * takers + position.lane % takers;
  const uint all = first < params.H ? experts * takes : 0;
  SeveralSums<2> sums = {};
  for (uint i = taker; i < all; i += parts * takers) {
    const uint slots = list[i / takes].slots;
    const int expert = list[i / takes].expert;
    const uint column = i % takes * take + (Chunk::per_lane ? 0 : position.lane * Chunk::apart);
    if (column >= params.I) continue;
    const Weights<typename Chunk::Data> of = of_expert(down, scale, offset, expert, params.down);
    const uint lead = ctz(slots);
    SeveralVectors<float, 2> vectors = {inner + first_slot * params.inner_length, params.inner_length, {}};
    float weight[2];
    for (uint t = 0; t < 2; ++t) {
      const uint own = slots_of(slots, t, params);
      vectors.row[t] = own == 0 ? lead : t * params.K + ctz(own);
      weight[t] = load(weights, first_slot + vectors.row[t], params.weights);
    }
    SeveralSums<2> products = {};
    if (popcount(slots) == 1) {
      const SeveralVectors<float, 1> vector = {vectors.first, params.inner_length, {lead}};
      SeveralSums<1> product = {};
      Chunk::template add_several<true>(rows, vector, of, params.down, column, product);
      for (uint t = 0; t < 2; ++t) products.of[t] = product.of[0];
    } else {
      Chunk::template add_several<true>(rows, vectors, of, params.down, column, products);
    }
    for (uint t = 0; t < 2; ++t) {
      if (slots_of(slots, t, params) == 0) continue;
      for (uint r = 0; r < kDotRows; ++r) sums.of[t].at[r] += weight[t] * products.of[t].at[r];
    }
  }
#pragma unroll
  for (uint t = 0; t < 2; ++t) store_partial<Chunk>(sums.of[t].at, partial + t * most_partial<Chunk>(), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint t = thread_index / tile_rows, row = thread_index % tile_rows, h = begin + row;
  if (t >= tokens || h >= params.H) return;
  threadgroup const float* own = partial + t * most_partial<Chunk>();
  const float total = sum_of_parts<Chunk>(own, row / kDotRows, parts, row % kDotRows) +
                      weighted_bias(bias, ids, weights, token + t, h, params);
  output[ulong(token + t) * params.H + h] =
      T(total + shared_and_residual(shared, shared_gate, residual, token + t, h, params));
}

}  // namespace moe_metal

// clang-format off
#define instantiate_rows2(dtype, suffix, read)                                \
  instantiate_kernel("experts_gate_up_rows2" suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_gate_up_rows2<dtype, read##_chunk(dtype)>) \
  instantiate_kernel("experts_down_rows2" suffix weights_suffix "_" #dtype,    \
                     moe_metal::experts_down_rows2<dtype, read##_chunk(dtype)>)
for_dtypes(instantiate_rows2, "_wide", wide)
