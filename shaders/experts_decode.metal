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
// _rows: lanes are along the columns of a few rows; _columns: across the rows of a few columns, for transposed weights.
// _wide: a lane loads 16 bytes of weights at a time; for packed weights, kPackedColumns columns.
// _rows2, for more than one token: weights are read and unpacked once for two slots of an expert.
// Grid: slots (gate_up) or tokens (down; of _rows2, pairs of tokens) along x, tiles of rows along y. With slots along
// x, slots of one expert read the same rows at about the same time, from the cache. WeightParams.parts simdgroups
// divide the columns of a row.
#include <metal_stdlib>
using namespace metal;

#include "dots.h"
#include "experts.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ lanes along the columns

MOE_METAL_CONSTANT uint kInnerRows = kDotRows / 2;  // inner elements of a tile: a gate row and an up row each

// The index of an element of inner.
inline ulong inner_at(uint slot, uint i, constant ExpertsParams& params) {
  return ulong(slot) * params.inner_length + (params.inner_reordered ? packed_index(i) : i);
}

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

// sum_k weights[k] * down_bias[expert_k], for one element
template <typename T>
float weighted_bias(device const T* bias, device const int* ids, device const T* weights, ulong token, uint h,
                    constant ExpertsParams& params) {
  float sum = 0;
  for (uint k = 0; k < params.K && params.down_bias != ParameterType::absent; ++k) {
    const ulong slot = token * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    sum += load(weights, slot, params.weights) * load(bias, ulong(expert) * params.H + h, params.down_bias);
  }
  return sum;
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

// ------------------------------------------------------------------------------------------ two slots together

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

#ifndef MOE_METAL_FORMAT
// ------------------------------------------------------------------------------------------ lanes across the rows

MOE_METAL_CONSTANT uint kColumnsAhead = 4;  // columns whose loads are in flight together

// The rows of a tile that belong to a lane, and their weights in a column. `lanes` lanes have all rows; the other lanes
// of a simdgroup have the same rows of other columns.
template <typename T, uint Rows>
struct WideColumn {
  enum : uint { rows = Rows, vectors = Wide<T>::vectors, lanes = Rows / Wide<T>::elements };
  device const T* first;
  long step;

  // Lanes past the last row repeat the work of the first lane; their results are not used.
  WideColumn(Weights<T> weights, constant WeightParams& params, thread const RowTile& tile, uint lane)
      : first(element(weights, params, tile, tile.has(row(lane, 0)) ? row(lane, 0) : 0, 0)), step(params.column) {}
  static uint row(uint lane, uint n) { return lane % lanes * Wide<T>::elements + n; }
  void load(uint column, thread Vectors<vectors>& values) const thread { load_wide(first + column * step, values); }
};
template <typename T, uint Rows>
struct AnyColumn {
  enum : uint { rows = Rows, vectors = Rows / 32, lanes = 8 };
  device const T* first;
  long row_step, column_step;
  RowTile tile;
  uint lane;

  AnyColumn(Weights<T> weights, constant WeightParams& params, thread const RowTile& tile, uint lane)
      : first(weights.data), row_step(params.row), column_step(params.column), tile(tile), lane(lane) {}
  static uint row(uint lane, uint n) { return lane % lanes + lanes * n; }
  void load(uint column, thread Vectors<vectors>& values) const thread {
    for (uint n = 0; n < 4 * vectors; ++n) {
      const uint j = row(lane, n);
      values.at[n / 4][n % 4] = tile.has(j) ? float(first[tile.number(j) * row_step + column * column_step]) : 0;
    }
  }
};

template <typename T>
using WideGateUp = WideColumn<T, kColumnRows>;
template <typename T>
using AnyGateUp = AnyColumn<T, kColumnRows>;
template <typename T>
using WideDown = WideColumn<T, kDownColumnRows>;
template <typename T>
using AnyDown = AnyColumn<T, kDownColumnRows>;

// sums += scale * (the lane's rows) * vector, over the lane's part of the columns: every parts-th column from `column`
// on.
template <typename Column, typename V>
void add_columns(thread Vectors<Column::vectors>& sums, float scale, device const V* vector,
                 thread const Column& weights, uint length, uint parts, uint column) {
  for (; column + (kColumnsAhead - 1) * parts < length; column += kColumnsAhead * parts) {
    Vectors<Column::vectors> w[kColumnsAhead];
    float v[kColumnsAhead];
    for (uint a = 0; a < kColumnsAhead; ++a) {
      weights.load(column + a * parts, w[a]);
      v[a] = scale * float(vector[column + a * parts]);
    }
    for (uint a = 0; a < kColumnsAhead; ++a) {
      for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += v[a] * w[a].at[n];
    }
  }
  for (; column < length; column += parts) {
    Vectors<Column::vectors> w;
    weights.load(column, w);
    for (uint n = 0; n < Column::vectors; ++n) sums.at[n] += scale * float(vector[column]) * w.at[n];
  }
}

// Adds up the sums of the lanes and simdgroups with other columns, in a fixed order. The results are in `partial`.
template <typename Column>
void sum_over_parts(thread Vectors<Column::vectors>& sums, threadgroup float* partial, uint thread_index, uint parts) {
  for (uint n = 0; n < Column::vectors; ++n) {
    for (ushort other = 16; other >= Column::lanes; other /= 2) sums.at[n] += simd_shuffle_xor(sums.at[n], other);
  }
  const uint lane = thread_index % 32;
  if (lane < Column::lanes) {
    threadgroup float* own = partial + thread_index / 32 * Column::rows;
    for (uint n = 0; n < 4 * Column::vectors; ++n) own[Column::row(lane, n)] = sums.at[n / 4][n % 4];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < Column::rows) {
    for (uint s = 1; s < parts; ++s) partial[thread_index] += partial[s * Column::rows + thread_index];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <typename T, typename Column>
[[kernel]] void experts_gate_up_columns(device const T* x [[buffer(0)]], device const int* ids [[buffer(1)]],
                                        device const T* gate_up [[buffer(2)]], device const uchar* scale [[buffer(3)]],
                                        device const uchar* offset [[buffer(4)]], device const T* bias [[buffer(5)]],
                                        device float* inner [[buffer(6)]], constant ExpertsParams& params [[buffer(7)]],
                                        uint2 group [[threadgroup_position_in_grid]],
                                        uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kColumnSimdgroups * Column::rows];
  const uint slot = group.x;
  if (slot >= params.T * params.K) return;
  const int expert = expert_of(ids, slot, params);
  if (expert < 0) return;
  const uint parts = params.gate_up.parts, column_parts = 32 / Column::lanes * parts;
  Vectors<Column::vectors> sums = {};
  const RowTile tile = gate_up_tile(group.y, params);
  const Column weights(of_expert(gate_up, scale, offset, expert, params.gate_up), params.gate_up, tile, thread_index);
  add_columns(sums, 1, x + ulong(slot / params.K) * params.H, weights, params.H, column_parts,
              thread_index / Column::lanes);
  sum_over_parts<Column>(sums, partial, thread_index, parts);
  const uint row = group.y * kColumnInner + thread_index;
  if (thread_index >= kColumnInner || row >= params.I) return;
  inner[inner_at(slot, row, params)] = inner_value(partial, thread_index, bias, expert, group.y, params);
}

template <typename T, typename Column>
[[kernel]] void experts_down_columns(device const float* inner [[buffer(0)]], device const int* ids [[buffer(1)]],
                                     device const T* weights [[buffer(2)]], device const T* down [[buffer(3)]],
                                     device const uchar* scale [[buffer(4)]], device const uchar* offset [[buffer(5)]],
                                     device const T* bias [[buffer(6)]], device const T* shared [[buffer(7)]],
                                     device const T* shared_gate [[buffer(8)]], device const T* residual [[buffer(9)]],
                                     device T* output [[buffer(10)]], constant ExpertsParams& params [[buffer(11)]],
                                     uint2 group [[threadgroup_position_in_grid]],
                                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kColumnSimdgroups * Column::rows];
  const uint token = group.x, parts = params.down.parts, column_parts = 32 / Column::lanes * parts;
  if (token >= params.T) return;
  const RowTile tile = plain_tile(group.y * Column::rows, params.H);
  Vectors<Column::vectors> sums = {};
  for (uint k = 0; k < params.K; ++k) {
    const ulong slot = ulong(token) * params.K + k;
    const int expert = expert_of(ids, slot, params);
    if (expert < 0) continue;
    const Column columns(of_expert(down, scale, offset, expert, params.down), params.down, tile, thread_index);
    add_columns(sums, load(weights, slot, params.weights), inner + slot * params.inner_length, columns, params.I,
                column_parts, thread_index / Column::lanes);
  }
  sum_over_parts<Column>(sums, partial, thread_index, parts);
  const uint h = group.y * Column::rows + thread_index;
  if (thread_index >= Column::rows || h >= params.H) return;
  const float total = partial[thread_index] + weighted_bias(bias, ids, weights, token, h, params);
  output[ulong(token) * params.H + h] = T(total + shared_and_residual(shared, shared_gate, residual, token, h, params));
}

#endif  // dense

}  // namespace moe_metal

// clang-format off
#define instantiate_rows(dtype, suffix, read)                                 \
  instantiate_kernel("experts_gate_up_rows" suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_gate_up_rows<dtype, read##_chunk(dtype)>) \
  instantiate_kernel("experts_down_rows" suffix weights_suffix "_" #dtype,    \
                     moe_metal::experts_down_rows<dtype, read##_chunk(dtype)>)
#define instantiate_columns(dtype, suffix, Read)                         \
  instantiate_kernel("experts_gate_up_columns" suffix "_" #dtype,        \
                     moe_metal::experts_gate_up_columns<dtype, moe_metal::Read##GateUp<dtype>>) \
  instantiate_kernel("experts_down_columns" suffix "_" #dtype,           \
                     moe_metal::experts_down_columns<dtype, moe_metal::Read##Down<dtype>>)
#define instantiate_rows2(dtype, suffix, read)                                \
  instantiate_kernel("experts_gate_up_rows2" suffix weights_suffix "_" #dtype, \
                     moe_metal::experts_gate_up_rows2<dtype, read##_chunk(dtype)>) \
  instantiate_kernel("experts_down_rows2" suffix weights_suffix "_" #dtype,    \
                     moe_metal::experts_down_rows2<dtype, read##_chunk(dtype)>)

#if in_part(rows_wide)
for_dtypes(instantiate_rows, "_wide", wide)
#endif
#if in_part(rows)
for_dtypes(instantiate_rows, "", any)
#endif
#if in_part(columns_wide) && !defined(MOE_METAL_FORMAT)
for_dtypes(instantiate_columns, "_wide", Wide)
#endif
#if in_part(columns) && !defined(MOE_METAL_FORMAT)
for_dtypes(instantiate_columns, "", Any)
#endif
#if in_part(rows2_wide)
for_dtypes(instantiate_rows2, "_wide", wide)
#endif
