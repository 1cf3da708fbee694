// Shared by decode and prefill of the op experts: ids, rows of weights, activation, and the terms that are added to the
// sum over experts.
#pragma once
#include "activation.h"
#include "row_tile.h"
#include "rows.h"

namespace moe_metal {

// The id of a slot. An int64 id is two words, the low one first.
inline int2 id_of(device const int* ids, ulong slot, constant ExpertsParams& params) {
  return params.long_ids ? reinterpret_cast<device const int2*>(ids)[slot] : int2(ids[slot], 0);
}
// The expert of an id, or -1 for an id outside [0, E). This waits until the id is loaded; `id_of` does not.
inline int expert_of(int2 id, constant ExpertsParams& params) {
  return id.y == 0 && id.x >= 0 && uint(id.x) < params.E ? id.x : -1;
}
inline int expert_of(device const int* ids, ulong slot, constant ExpertsParams& params) {
  return expert_of(id_of(ids, slot, params), params);
}

// sigmoid(shared_gate) * shared + residual, for one element.
template <typename T>
float shared_and_residual(device const T* shared, device const T* shared_gate, device const T* residual, ulong token,
                          uint h, constant ExpertsParams& params) {
  const ulong i = token * params.H + h;
  float total = 0;
  if (params.has_shared) {
    const bool gated = params.shared_gate != ParameterType::absent;
    total = (gated ? sigmoid(load(shared_gate, token, params.shared_gate)) : 1) * float(shared[i]);
  }
  return params.has_residual ? total + float(residual[i]) : total;
}

// ------------------------------------------------------------------------------------------ rows of weights

// The row of gate_up for inner element i: of gate (which = 0) or up (which = 1).
inline uint gate_up_row(uint i, uint which, constant ExpertsParams& params) {
  return params.interleaved ? 2 * i + which : i + which * params.I;
}

// A threadgroup's rows of gate_up: kColumnInner gate rows and their up rows, alternating if interleaved, else all gate
// rows first. `index` is that of the threadgroup along y.
inline RowTile gate_up_tile(uint index, constant ExpertsParams& params) {
  RowTile tile;
  tile.first = gate_up_row(index * kColumnInner, 0, params);
  tile.jump = params.interleaved ? 0 : params.I - kColumnInner;
  tile.shift = params.interleaved ? 1 : 0;
  tile.mask = kColumnInner - 1;
  tile.limit = params.I - index * kColumnInner;
  return tile;
}

// ------------------------------------------------------------------------------------------ between the products

// An element of inner: adds the biases to the products of gate and up, and applies the activation.
template <typename T>
float inner_value(float gate, float up, device const T* bias, int expert, uint row, constant ExpertsParams& params) {
  if (params.gate_up_bias != ParameterType::absent) {
    const ulong first = ulong(expert) * 2 * params.I + row * params.bias_stride;
    gate += load(bias, first, params.gate_up_bias);
    up += load(bias, first + params.up_bias_offset, params.gate_up_bias);
  }
  return activated(gate, up, params.activation);
}

// The same for inner element i of a tile of gate_up_tile, from the tile's products.
template <typename T>
float inner_value(threadgroup const float* products, uint i, device const T* bias, int expert, uint index,
                  constant ExpertsParams& params) {
  const float gate = products[params.interleaved ? 2 * i : i];
  const float up = products[params.interleaved ? 2 * i + 1 : i + kColumnInner];
  return inner_value(gate, up, bias, expert, index * kColumnInner + i, params);
}

}  // namespace moe_metal
