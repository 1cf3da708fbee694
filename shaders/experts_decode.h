// Shared by the kernels of the op experts for few slots, see experts_decode.metal.
#pragma once
#include "dots.h"
#include "experts.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kInnerRows = kDotRows / 2;  // inner elements of a tile: a gate row and an up row each

// The index of an element of inner.
inline ulong inner_at(uint slot, uint i, constant ExpertsParams& params) {
  return ulong(slot) * params.inner_length + (params.inner_reordered ? packed_index(i) : i);
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

}  // namespace moe_metal
