// What the two regimes of the op experts share: ids, loads of 16 bytes, where rows of weights lie, and what is added
// beside the experts.
#pragma once
#include "activation.h"
#include "rows.h"

namespace moe_metal {

// The expert of a slot, or -1 for an id outside [0, E). An int64 id is two words, the low one first.
inline int expert_of(device const int* ids, ulong slot, constant ExpertsParams& params) {
  const int2 id = params.long_ids ? reinterpret_cast<device const int2*>(ids)[slot] : int2(ids[slot], 0);
  return id.y == 0 && id.x >= 0 && uint(id.x) < params.E ? id.x : -1;
}

// sigmoid(shared_gate) * shared + residual, of one element.
template <typename T>
float beside_experts(device const T* shared, device const T* shared_gate, device const T* residual, ulong token, uint h,
                     constant ExpertsParams& params) {
  const ulong i = token * params.H + h;
  float total = 0;
  if (params.has_shared) {
    const bool gated = params.shared_gate != ParameterType::absent;
    total = (gated ? sigmoid(load(shared_gate, token, params.shared_gate)) : 1) * float(shared[i]);
  }
  return params.has_residual ? total + float(residual[i]) : total;
}

// ------------------------------------------------------------------------------------------ 16 bytes at once

template <uint N>
struct Vectors {
  float4 at[N];
};

// 16 bytes hold four floats, or eight of half or bfloat: one or two vectors of four.
template <typename T>
struct Wide {
  enum : uint { vectors = sizeof(T) == 4 ? 1 : 2, elements = 4 * vectors };
  using Values = Vectors<vectors>;
};

// One load, not two of 8 bytes.
template <typename T>
void load_wide(device const T* source, thread Vectors<2>& values) {
  const uint4 bits = *reinterpret_cast<device const uint4*>(source);
  const vec<T, 4> low = as_type<vec<T, 4>>(bits.xy), high = as_type<vec<T, 4>>(bits.zw);
  values.at[0] = float4(float(low.x), float(low.y), float(low.z), float(low.w));
  values.at[1] = float4(float(high.x), float(high.y), float(high.z), float(high.w));
}
inline void load_wide(device const float* source, thread Vectors<1>& values) {
  values.at[0] = *reinterpret_cast<device const float4*>(source);
}
// Floats that meet eight of half or bfloat.
inline void load_wide(device const float* source, thread Vectors<2>& values) {
  values.at[0] = reinterpret_cast<device const float4*>(source)[0];
  values.at[1] = reinterpret_cast<device const float4*>(source)[1];
}

// ------------------------------------------------------------------------------------------ 64 rows of weights

// The rows that a threadgroup works on, numbered as they lie in memory: up to 64 rows of down, or of gate_up 32 gate
// rows and their 32 up rows, which lie in turn when interleaved and else one kind after the other.
template <typename T>
struct RowTile {
  device const T* weights;  // row 0
  long step;                // from one row to the next
  long jump;                // added from row 32 on
  long column;              // from one column to the next
  uint shift, mask, limit;  // row j exists when (j >> shift & mask) < limit

  bool has(uint j) const { return (j >> shift & mask) < limit; }
  device const T* at(uint j, uint c) const { return weights + j * step + (j < kTileInner ? 0 : jump) + c * column; }
};

template <typename T>
RowTile<T> gate_up_tile(device const T* gate_up, int expert, uint block, constant ExpertsParams& params) {
  const long row = params.gate_up.row, up = params.gate_up.up;
  RowTile<T> tile;
  tile.weights = gate_up + expert * params.gate_up.expert + long(block) * kTileInner * row;
  tile.step = params.interleaved ? up : row;
  tile.jump = params.interleaved ? 0 : up - long(kTileInner) * row;
  tile.column = params.gate_up.column;
  tile.shift = params.interleaved ? 1 : 0;
  tile.mask = kTileInner - 1;
  tile.limit = params.I - block * kTileInner;
  return tile;
}

template <typename T>
RowTile<T> down_tile(device const T* down, int expert, uint first, constant ExpertsParams& params) {
  RowTile<T> tile;
  tile.weights = down + expert * params.down.expert + long(first) * params.down.row;
  tile.step = params.down.row;
  tile.jump = 0;
  tile.column = params.down.column;
  tile.shift = 0;
  tile.mask = kTileRows - 1;
  tile.limit = params.H - first;
  return tile;
}

// ------------------------------------------------------------------------------------------ between the products

// The activated inner value of an expert's row: its gate and up products, biased.
template <typename T>
float inner_value(float gate, float up, device const T* bias, int expert, uint row, constant ExpertsParams& params) {
  if (params.gate_up_bias != ParameterType::absent) {
    const ulong first = ulong(expert) * 2 * params.I;
    gate += load(bias, first + (params.interleaved ? 2 * row : row), params.gate_up_bias);
    up += load(bias, first + (params.interleaved ? 2 * row + 1 : row + params.I), params.gate_up_bias);
  }
  return activated(gate, up, params.activation);
}

// The same for row i of a block, from the products of the block's tile.
template <typename T>
float inner_value(threadgroup const float* products, uint i, device const T* bias, int expert, uint block,
                  constant ExpertsParams& params) {
  const float gate = products[params.interleaved ? 2 * i : i];
  const float up = products[params.interleaved ? 2 * i + 1 : i + kTileInner];
  return inner_value(gate, up, bias, expert, block * kTileInner + i, params);
}

}  // namespace moe_metal
