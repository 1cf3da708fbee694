// sum_k weights[k] * slots[k], shared by the five weighted sums.
#pragma once
#include "rows.h"

namespace moe_metal {

// The slots of one token. `aligned` is a template parameter of the loop over K, so there is no branch between its
// loads.
template <typename T>
struct Slots {
  device const T* slots;    // [K, H]
  device const T* weights;  // [T, K], of either type
  ulong first;              // this token's first weight
  uint top_k, length;
  ParameterType weights_type;

  Slots(device const T* slots, device const T* weights, ulong token, WeightedSumParams params)
      : slots(slots + token * params.top_k * params.row.length),
        weights(weights),
        first(token * params.top_k),
        top_k(params.top_k),
        length(params.row.length),
        weights_type(params.weights) {}

  // Elements i to i + 3 of the sum.
  float4 sum(uint i, bool aligned) const thread {
    device const float* as_float = reinterpret_cast<device const float*>(weights);
    if (weights_type == ParameterType::float32) return aligned ? add<true>(i, as_float) : add<false>(i, as_float);
    return aligned ? add<true>(i, weights) : add<false>(i, weights);
  }

 private:
  template <bool aligned, typename W>
  float4 add(uint i, device const W* w) const thread {
    float4 total = 0;
    uint k = 0;
    for (; k + 4 <= top_k; k += 4) {  // four loads at a time
      const float4 a = slot<aligned>(k, i), b = slot<aligned>(k + 1, i), c = slot<aligned>(k + 2, i),
                   d = slot<aligned>(k + 3, i);
      total += float(w[first + k]) * a;
      total += float(w[first + k + 1]) * b;
      total += float(w[first + k + 2]) * c;
      total += float(w[first + k + 3]) * d;
    }
    for (; k < top_k; ++k) total += float(w[first + k]) * slot<aligned>(k, i);
    return total;
  }

  template <bool aligned>
  float4 slot(uint k, uint i) const thread {
    return load4<aligned>(slots + ulong(k) * length, i, length);
  }
};

}  // namespace moe_metal
