// sum_k weights[k] * slots[k], shared by the five weighted sums.
#pragma once
#include "cpu/vector/rows.h"

namespace moe_metal {

// row = sum_k weights[k] * slots[k], for the K rows of one token.
template <class Scalar>
inline void weighted_slots(const Scalar* slots, const float* weights, int64_t K, int64_t H, float* row) {
  int64_t h = 0;
  for (; h + kUnroll * kLanes <= H; h += kUnroll * kLanes) {
    Vec total[kUnroll] = {Vec(0), Vec(0), Vec(0), Vec(0)};
    for (int64_t k = 0; k < K; ++k) {
      const Vec weight(weights[k]);
      for (int v = 0; v < kUnroll; ++v) {
        total[v] = at::vec::fmadd(weight, load(slots + k * H + h + v * kLanes, Whole()), total[v]);
      }
    }
    for (int v = 0; v < kUnroll; ++v) store(row + h + v * kLanes, total[v], Whole());
  }
  for_each_vector(H - h, [&](int64_t i, auto count) {
    Vec total(0);
    for (int64_t k = 0; k < K; ++k) {
      total = at::vec::fmadd(Vec(weights[k]), load(slots + k * H + h + i, count), total);
    }
    store(row + h + i, total, count);
  });
}

}  // namespace moe_metal
