// Products of queries with keys, and of weights with values, in float: the way of every processor.
#pragma once
#include <cmath>
#include <limits>

#include "cpu/vector/vec.h"

namespace moe_metal {

constexpr int64_t kTileRows = 128, kKeys = 64;  // the most rows of a tile, and keys of a chunk
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How many rows or keys have their sums in registers, two vectors each.
constexpr int kSumsAtOnce = kVectorRegisters / 4;

// The scores of N vectors of rows with K keys; key k is at keys + k * step. A word is a float, or two bfloat16, whose
// products are exact in float. The n-th vector of a word is queries[word * lanes + n * kLanes ...]. With few rows
// memory is the limit, so they prefetch the next keys, from `ahead` on, one line for each word.
template <int N, int K>
[[gnu::flatten, gnu::noinline]] inline void score_floats(const float* queries, int64_t words, int64_t lanes,
                                                         const float* keys, int64_t step, const float* ahead,
                                                         float* scores) {
  constexpr int64_t kAtOnce = 128;  // words of a partial sum, which bounds the rounding error of long heads
  Vec sums[K][N];
  unrolled<K>([&](auto k) { unrolled<N>([&](auto n) { sums[k][n] = Vec(0); }); });
  for (int64_t w = 0; w < words; ++w) {
    if (w > 0 && w % kAtOnce == 0) {
      unrolled<K>([&](auto k) {
        unrolled<N>([&](auto n) {
          float* const sum = scores + k * lanes + n * kLanes;
          store(sum, w == kAtOnce ? sums[k][n] : load(sum, Whole()) + sums[k][n], Whole());
          sums[k][n] = Vec(0);
        });
      });
    }
    if (N == 1) __builtin_prefetch(ahead + w % K * step + w / K * 16, 0, 2);
    Vec query[N];
    unrolled<N>([&](auto n) { query[n] = load(queries + w * lanes + n * kLanes, Whole()); });
    unrolled<K>([&](auto k) {
      const Vec key(keys[k * step + w]);
      unrolled<N>([&](auto n) { sums[k][n] = at::vec::fmadd(key, query[n], sums[k][n]); });
    });
  }
  unrolled<K>([&](auto k) {
    unrolled<N>([&](auto n) {
      float* const sum = scores + k * lanes + n * kLanes;
      store(sum, words > kAtOnce ? load(sum, Whole()) + sums[k][n] : sums[k][n], Whole());
    });
  });
}

// out = out * factor + weights @ values, for R rows and C vectors of the values' columns. `ahead`: prefetch the next
// chunk.
template <int R, int C, class Scalar, class Count>
[[gnu::flatten, gnu::noinline]] inline void add_values(const Scalar* values, int64_t step, int64_t keys,
                                                       const float* weights, int64_t lanes, const float* factors,
                                                       float* out, int64_t width, bool ahead, Count count) {
  Vec sums[R][C];
  unrolled<R>([&](auto r) {
    unrolled<C>([&](auto c) { sums[r][c] = load(out + r * width + c * kLanes, Whole()) * Vec(factors[r]); });
  });
  for (int64_t key = 0; key < keys; ++key) {
    const Scalar* here = values + key * step;
    if (ahead) __builtin_prefetch(here + kKeys * step, 0, 2);
    Vec value[C];
    unrolled<C>([&](auto c) { value[c] = load(here + c * kLanes, count); });
    unrolled<R>([&](auto r) {
      const Vec weight(weights[key * lanes + r]);
      unrolled<C>([&](auto c) { sums[r][c] = at::vec::fmadd(weight, value[c], sums[r][c]); });
    });
  }
  unrolled<R>([&](auto r) { unrolled<C>([&](auto c) { store(out + r * width + c * kLanes, sums[r][c], Whole()); }); });
}

// What AttentionTile needs of products. `lanes` is how many scores a key has: one per row, rounded up. A word is what a
// product multiplies at once: here one float.
template <class Of>
struct FloatProducts {
  using Scalar = Of;  // of the tensors
  using Key = float;  // of keys and queries as they are multiplied

  static int64_t lanes_of(int64_t rows) { return at::divup(rows, kLanes) * kLanes; }
  static int64_t words_of(int64_t columns, int64_t) { return columns; }
  // How many columns of a row are contiguous in the transposed queries.
  static int64_t columns_together(int64_t) { return 1; }

  // The scores of 2 * kSumsAtOnce keys with all rows.
  static void multiply_keys(const float* queries, int64_t words, int64_t lanes, const Key* keys, int64_t step,
                            const Key* ahead, float* scores) {
    constexpr int K = kSumsAtOnce;
    int64_t r = 0;
    for (; r + 2 * kLanes <= lanes; r += 2 * kLanes) {
      score_floats<2, K>(queries + r, words, lanes, keys, step, ahead, scores + r);
      score_floats<2, K>(queries + r, words, lanes, keys + K * step, step, ahead, scores + K * lanes + r);
    }
    if (r < lanes) score_floats<1, 2 * K>(queries + r, words, lanes, keys, step, ahead, scores + r);
  }

  // Computes e^(score - greatest) for a vector of lanes and all keys. -> their sums. some_barred becomes true if any
  // key is masked.
  static Vec weigh(const float* scores, int64_t lanes, const Vec& greatest, float* weights, bool& some_barred) {
    const Vec none(-kInfinity);
    Vec sums(0), barred(0);
    for (int64_t at = 0; at < kKeys * lanes; at += lanes) {
      const Vec score = load(scores + at, Whole()), weight = exp2((score - greatest) * Vec(1.44269504f));
      barred = barred | (score == none);
      sums = sums + weight;
      store(weights + at, weight, Whole());
    }
    some_barred |= barred.zero_mask() != (1 << kLanes) - 1;
    return sums;
  }

  // out = out * factor + weights @ values, for R rows and all columns.
  template <int R>
  static void add_values(const Scalar* values, int64_t step, int64_t keys, const float* weights, int64_t lanes,
                         const float* factors, float* out, int64_t width, bool ahead, int64_t columns) {
    const auto add = [&](int64_t v, auto vectors, auto count) {
      moe_metal::add_values<R, vectors>(values + v, step, keys, weights, lanes, factors, out + v, width, ahead, count);
    };
    int64_t v = 0;
    for (; v + 2 * kLanes <= columns; v += 2 * kLanes) add(v, std::integral_constant<int, 2>(), Whole());
    for_each_vector(columns - v, [&](int64_t i, auto count) { add(v + i, std::integral_constant<int, 1>(), count); });
  }

  // The weight of key n for a row, given the row's first one.
  static float weight(const float* weights, int64_t lanes, int64_t n) { return weights[n * lanes]; }
  // Where the sum of a column of values is in `out`, until order() puts all of them in order.
  static int64_t index_of(int64_t column) { return column; }
  static void order(float*, int64_t) {}
};

}  // namespace moe_metal
