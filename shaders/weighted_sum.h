// sum_k weights[k] * slots[k]: what the five weighted sums share.
#pragma once
#include "rows.h"

namespace moe_metal {

// The slots of one token.
template <typename T>
struct Slots {
  device const T* slots;    // [K, H]
  device const T* weights;  // [T, K], of either type
  ulong first;              // this token's first weight
  WeightedSumParams params;

  Slots(device const T* slots, device const T* weights, ulong token, WeightedSumParams params)
      : slots(slots + token * params.top_k * params.row.length),
        weights(weights),
        first(token * params.top_k),
        params(params) {}

  float weight(uint k) const { return load(weights, first + k, params.weights); }
  device const T* slot(uint k) const { return slots + ulong(k) * params.row.length; }

  // Elements i to i + 3. Four slots at a time, without a branch between their loads, so that they overlap.
  float4 sum(uint i) const {
    float4 total = 0;
    uint k = 0;
    for (; params.row.wide && k + 4 <= params.top_k; k += 4) {
      const float4 w = float4(weight(k), weight(k + 1), weight(k + 2), weight(k + 3));
      const float4 a = load4_wide(slot(k) + i), b = load4_wide(slot(k + 1) + i);
      const float4 c = load4_wide(slot(k + 2) + i), d = load4_wide(slot(k + 3) + i);
      total += w.x * a;
      total += w.y * b;
      total += w.z * c;
      total += w.w * d;
    }
    for (; k < params.top_k; ++k) total += weight(k) * load4(slot(k), i, params.row);
    return total;
  }
};

}  // namespace moe_metal
