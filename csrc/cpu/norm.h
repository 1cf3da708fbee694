// Sums and norms of rows, shared by the ops that end or begin a layer.
#pragma once
#include <cmath>

#include "vec.h"

namespace moe_metal {

constexpr int kUnroll = 4;  // independent sums, to hide the latency of each addition

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

// rsqrt(mean(row^2) + eps)
template <class Scalar>
inline float rms(const Scalar* row, int64_t H, float eps) {
  Vec squares[kUnroll] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t h = 0;
  for (; h + kUnroll * kLanes <= H; h += kUnroll * kLanes) {
    for (int v = 0; v < kUnroll; ++v) {
      const Vec x = load(row + h + v * kLanes, Whole());
      squares[v] = at::vec::fmadd(x, x, squares[v]);
    }
  }
  for_each_vector(H - h, [&](int64_t i, auto count) {
    const Vec x = load(row + h + i, count);
    squares[0] = at::vec::fmadd(x, x, squares[0]);
  });
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1 / std::sqrt(total / static_cast<float>(H) + eps);
}

}  // namespace moe_metal
