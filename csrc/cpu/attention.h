// `attention` of some queries over some keys, a block of keys after the other: the softmax is kept up as blocks come.
//
// A row is one query of one head, and rows are those of all heads that share a key head: G of them for each query. So a
// block of keys and values is read once for all of its rows. Keys lie along the lanes of vectors, for which a block of
// them is transposed, so that neither scores nor their softmax need sums across lanes.
#pragma once
#include <limits>

#include "ops.h"
#include "vec.h"

namespace moe_metal {

constexpr int64_t kRows = 128, kKeys = 64;  // at most of a tile, and of a block
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;  // scores are kept times this, since 2^x is simpler than e^x

// How many rows' sums are in registers, two vectors each. AVX-512 and ARM have 32 registers, others 16.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int kRowsAtOnce = 8;
#else
constexpr int kRowsAtOnce = 4;
#endif

// body(first, integral_constant count) for groups of rows.
template <class Body>
inline void by_rows(int64_t rows, Body&& body) {
  int64_t r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) body(r, std::integral_constant<int, kRowsAtOnce>());
  if constexpr (kRowsAtOnce > 4) {
    for (; r + 4 <= rows; r += 4) body(r, std::integral_constant<int, 4>());
  }
  for (; r + 2 <= rows; r += 2) body(r, std::integral_constant<int, 2>());
  for (; r < rows; ++r) body(r, std::integral_constant<int, 1>());
}

// The scores of R rows with two vectors of keys: `keys` has two vectors for each word of a query. A word is a float, or
// two bfloat16, whose products are exact in float.
template <int R>
[[gnu::flatten, gnu::noinline]] inline void dot_floats(const float* queries, int64_t words, const float* keys,
                                                       float* scores) {
  Vec sums[R][2];
  unrolled<R>([&](auto r) { sums[r][0] = sums[r][1] = Vec(0); });
  for (int64_t w = 0; w < words; ++w) {
    const Vec first = load(keys + 2 * w * kLanes, Whole()), second = load(keys + (2 * w + 1) * kLanes, Whole());
    unrolled<R>([&](auto r) {
      const Vec query(queries[r * words + w]);
      sums[r][0] = at::vec::fmadd(query, first, sums[r][0]);
      sums[r][1] = at::vec::fmadd(query, second, sums[r][1]);
    });
  }
  unrolled<R>([&](auto r) {
    store(scores + r * kKeys, sums[r][0], Whole());
    store(scores + r * kKeys + kLanes, sums[r][1], Whole());
  });
}

#if defined(CPU_CAPABILITY_AVX512)
template <int R>
[[MOE_METAL_BF16, gnu::noinline]] inline void dot_pairs(const float* queries, int64_t words, const float* keys,
                                                        float* scores) {
  __m512 sums[R][2];
  MOE_METAL_UNROLL for (int i = 0; i < 2 * R; ++i) sums[i / 2][i % 2] = _mm512_setzero_ps();
  for (int64_t w = 0; w < words; ++w) {
    const auto first = reinterpret_cast<__m512bh>(_mm512_load_ps(keys + 32 * w));
    const auto second = reinterpret_cast<__m512bh>(_mm512_load_ps(keys + 32 * w + 16));
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      const auto query = reinterpret_cast<__m512bh>(_mm512_set1_ps(queries[r * words + w]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], query, first);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], query, second);
    }
  }
  MOE_METAL_UNROLL for (int i = 0; i < 2 * R; ++i) {
    _mm512_store_ps(scores + i / 2 * kKeys + i % 2 * kLanes, sums[i / 2][i % 2]);
  }
}
#endif

// out = out * factor + weights @ values, of R rows and C vectors of the values' columns. `ahead` is whether to bring
// the next block to the caches.
template <int R, int C, class Scalar, class Count>
[[gnu::flatten, gnu::noinline]] inline void add_values(const Scalar* values, int64_t step, int64_t keys,
                                                       const float* weights, const float* factors, float* out,
                                                       int64_t width, bool ahead, Count count) {
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
      const Vec weight(weights[r * kKeys + key]);
      unrolled<C>([&](auto c) { sums[r][c] = at::vec::fmadd(weight, value[c], sums[r][c]); });
    });
  }
  unrolled<R>([&](auto r) { unrolled<C>([&](auto c) { store(out + r * width + c * kLanes, sums[r][c], Whole()); }); });
}

// Some rows of one sequence and key head, and the keys that they are to see.
struct Span {
  int64_t sequence, head;
  int64_t first_row, rows;
  int64_t first_key, last_key;
};

// What rows have come to: their greatest score, the sum of 2^(score - greatest), and that of the values times these.
struct Sums {
  float *greatest, *total, *out;
  int64_t width;  // of a row of `out`
};

// One per thread. `pairs`: words of two bfloat16, on processors with AVX512-BF16.
template <class Scalar, bool pairs>
class AttentionTile {
 public:
  explicit AttentionTile(const Attention& call)
      : call_(call),
        group_(call.A / call.J),
        words_(pairs ? at::divup(call.D, 2) : call.D),
        rows_(std::min(kRows, group_ * call.T)),
        width_(at::divup(call.V, kLanes) * kLanes),
        queries_(scratch<float>(rows_ * words_)),
        keys_(scratch<float>(kKeys * words_)),
        scores_(scratch<float>(rows_ * kKeys)),
        weights_(scratch<float>(rows_ * kKeys)),
        out_(scratch<float>(rows_ * width_)),
        rows_sums_(scratch<float>(3 * rows_)),
        lined_up_(
            scratch<Scalar>(call.k.stride(3) == 1 && call.v.stride(3) == 1 ? 0 : kKeys * std::max(call.D, call.V))) {}

  Sums operator()(const Span& span) {
    span_ = span;
    read_queries();
    std::fill_n(greatest(), span.rows, -kInfinity);
    std::fill_n(total(), span.rows, 0.0f);
    std::fill_n(out_.get(), span.rows * width_, 0.0f);
    for (int64_t key = span.first_key; key < span.last_key; key += kKeys) {
      const int64_t count = std::min(kKeys, span.last_key - key);
      multiply_keys(key, count);
      const bool some_barred = weigh(key, count);
      multiply_values(key, count, some_barred);
    }
    return {greatest(), total(), out_.get(), width_};
  }

 private:
  float* greatest() { return rows_sums_.get(); }
  float* total() { return rows_sums_.get() + rows_; }
  float* factors() { return rows_sums_.get() + 2 * rows_; }
  int64_t query_of(int64_t r) const { return (span_.first_row + r) / group_; }
  int64_t head_of(int64_t r) const { return span_.head * group_ + (span_.first_row + r) % group_; }

  void read_queries() {
    const int64_t step = call_.q.stride(3);
    for (int64_t r = 0; r < span_.rows; ++r) {
      const auto* from = elements<Scalar>(call_.q) + span_.sequence * call_.q.stride(0) +
                         head_of(r) * call_.q.stride(1) + query_of(r) * call_.q.stride(2);
      float* to = queries_.get() + r * words_;
      if constexpr (pairs) {
        to[words_ - 1] = 0;
        auto* halves = reinterpret_cast<char*>(to);
        for (int64_t d = 0; d < call_.D; ++d) std::memcpy(halves + 2 * d, from + d * step, 2);
      } else {
        for (int64_t d = 0; d < call_.D; ++d) to[d] = static_cast<float>(from[d * step]);
      }
    }
  }

  // Where a block lies and how far apart its rows are, whose elements are then neighbours.
  struct Block {
    const Scalar* data;
    int64_t step;
  };
  Block block_of(const Tensor& tensor, int64_t key, int64_t count) {
    const auto* from = elements<Scalar>(tensor) + span_.sequence * tensor.stride(0) + span_.head * tensor.stride(1) +
                       key * tensor.stride(2);
    const int64_t columns = tensor.size(3), column = tensor.stride(3);
    if (column == 1 || columns == 1) return {from, tensor.stride(2)};
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t c = 0; c < columns; ++c) lined_up_[n * columns + c] = from[n * tensor.stride(2) + c * column];
    }
    return {lined_up_.get(), columns};
  }

  // A vector of a key's words, and 0 beyond its last.
  static Vec words_at(const Scalar* key, int64_t word, int64_t D) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (pairs) {
      const int64_t left = D - 2 * word;
      const __mmask32 there = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(there, key + 2 * word));
    }
#endif
    return D - word >= kLanes ? load(key + word, Whole()) : load(key + word, D - word);
  }

  // For two vectors of keys after the other: word after word, and 0 for keys beyond the last.
  void transpose_keys(const Block& block, int64_t count) {
    for (int64_t first = 0; first < at::divup(count, 2 * kLanes) * 2 * kLanes; first += kLanes) {
      float* to = keys_.get() + first / (2 * kLanes) * 2 * kLanes * words_ + first % (2 * kLanes);
      for (int64_t word = 0; word < words_; word += kLanes) {
        Vec tile[kLanes];
        for (int64_t n = 0; n < kLanes; ++n) {
          const auto* key = block.data + (first + n) * block.step;
          __builtin_prefetch(key + kKeys * block.step + word * (pairs ? 2 : 1), 0, 2);
          tile[n] = first + n < count ? words_at(key, word, call_.D) : Vec(0);
        }
        transpose(tile);
        const int64_t words = std::min(kLanes, words_ - word);
        for (int64_t w = 0; w < words; ++w) store(to + (word + w) * 2 * kLanes, tile[w], Whole());
      }
    }
  }

  void multiply_keys(int64_t key, int64_t count) {
    transpose_keys(block_of(call_.k, key, count), count);
    for (int64_t first = 0; first < count; first += 2 * kLanes) {
      const float* keys = keys_.get() + first * words_;
      by_rows(span_.rows, [&](int64_t r, auto R) {
        const float* queries = queries_.get() + r * words_;
        float* scores = scores_.get() + r * kKeys + first;
#if defined(CPU_CAPABILITY_AVX512)
        if constexpr (pairs) return dot_pairs<R>(queries, words_, keys, scores);
#endif
        dot_floats<R>(queries, words_, keys, scores);
      });
    }
  }

  // Scores to weights, relative to the greatest score so far. -> whether any key is barred to any row
  bool weigh(int64_t key, int64_t count) {
    bool some_barred = false;
    int64_t masked = -1;
    for (int64_t r = 0; r < span_.rows; ++r) {
      const int64_t t = query_of(r);
      float* scores = scores_.get() + r * kKeys;
      scale_scores(scores);
      if (call_.mask.defined()) {
        if (t != masked || call_.mask.stride(1) != 0) read_mask(key, count, head_of(r), t);
        masked = t;
        add_mask(scores);
      }
      const int64_t first = std::clamp<int64_t>(call_.first_key(t) - key, 0, kKeys);
      const int64_t last = std::clamp<int64_t>(std::min(call_.last_key(t) - key, count), first, kKeys);
      std::fill(scores, scores + first, -kInfinity);
      std::fill(scores + last, scores + kKeys, -kInfinity);
      some_barred |= softmax_row(scores, r);
    }
    return some_barred;
  }

  void scale_scores(float* scores) const {
    if (call_.softcap == 0) {
      const Vec scale(call_.scale * kLog2E);
      for (int64_t i = 0; i < kKeys; i += kLanes) store(scores + i, load(scores + i, Whole()) * scale, Whole());
      return;
    }
    const Vec scale(call_.scale), softcap(call_.softcap), log2e(kLog2E);
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Vec score = softcap * (load(scores + i, Whole()) * scale / softcap).tanh();
      store(scores + i, score * log2e, Whole());
    }
  }

  void read_mask(int64_t key, int64_t count, int64_t head, int64_t t) {
    const Tensor& mask = call_.mask;
    const int64_t at =
        span_.sequence * mask.stride(0) + head * mask.stride(1) + t * mask.stride(2) + key * mask.stride(3);
    const int64_t step = mask.stride(3);
    if (mask.scalar_type() == at::kBool) {
      const bool* seen = elements<bool>(mask) + at;
      for (int64_t n = 0; n < count; ++n) added_[n] = seen[n * step] ? 0.0f : -kInfinity;
      return;
    }
    with_dtype(mask.scalar_type(), [&](auto scalar) {
      const auto* from = elements<decltype(scalar)>(mask) + at;
      for (int64_t n = 0; n < count; ++n) added_[n] = static_cast<float>(from[n * step]) * kLog2E;
    });
  }

  // What is barred is so whatever its score is.
  void add_mask(float* scores) const {
    const Vec barred(-kInfinity);
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Vec added = load(added_ + i, Whole());
      store(scores + i, Vec::blendv(load(scores + i, Whole()) + added, barred, added == barred), Whole());
    }
  }

  // -> whether any key is barred
  bool softmax_row(const float* scores, int64_t r) {
    constexpr int kVectors = kKeys / kLanes;
    Vec greatest_of(-kInfinity);
    for (int64_t i = 0; i < kKeys; i += kLanes) greatest_of = at::vec::maximum(greatest_of, load(scores + i, Whole()));
    const float block =
        at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, greatest_of);
    const float before = greatest()[r], now = before < block || std::isnan(block) ? block : before;
    const Vec least_power(now == -kInfinity ? 0 : now);  // of no key at all, weights are 0, not NaN
    Vec sums(0), barred(0);
    for (int64_t i = 0; i < kVectors; ++i) {
      const Vec score = load(scores + i * kLanes, Whole());
      const Vec weight = exp2(score - least_power);
      barred = barred | (score == Vec(-kInfinity));
      sums = sums + weight;
      store(weights_.get() + r * kKeys + i * kLanes, weight, Whole());
    }
    factors()[r] = now == before ? 1 : std::exp2(before - now);
    greatest()[r] = now;
    total()[r] = total()[r] * factors()[r] + sum(sums);
    return barred.zero_mask() != (1 << kLanes) - 1;
  }

  void multiply_values(int64_t key, int64_t count, bool some_barred) {
    const Block block = block_of(call_.v, key, count);
    if (some_barred && !is_finite(block, count)) return add_seen_values(block, count);
    by_rows(span_.rows, [&](int64_t r, auto R) {
      const float* weights = weights_.get() + r * kKeys;
      float* out = out_.get() + r * width_;
      int64_t v = 0;
      for (; v + 2 * kLanes <= call_.V; v += 2 * kLanes) {
        add_values<R, 2>(block.data + v, block.step, count, weights, factors() + r, out + v, width_, r == 0, Whole());
      }
      for_each_vector(call_.V - v, [&](int64_t i, auto columns) {
        add_values<R, 1>(block.data + v + i, block.step, count, weights, factors() + r, out + v + i, width_, r == 0,
                         columns);
      });
    });
  }

  bool is_finite(const Block& block, int64_t count) const {
    Vec zero(0);
    for (int64_t n = 0; n < count; ++n) {
      for_each_vector(call_.V, [&](int64_t v, auto columns) {
        zero = at::vec::fmadd(load(block.data + n * block.step + v, columns), Vec(0), zero);
      });
    }
    return sum(zero) == 0;
  }

  // Where a value is infinite or NaN, a weight of 0 does not keep it out: what is barred is left out.
  void add_seen_values(const Block& block, int64_t count) {
    for (int64_t r = 0; r < span_.rows; ++r) {
      const float *weights = weights_.get() + r * kKeys, *scores = scores_.get() + r * kKeys;
      float* out = out_.get() + r * width_;
      for (int64_t v = 0; v < call_.V; ++v) out[v] *= factors()[r];
      for (int64_t n = 0; n < count; ++n) {
        if (scores[n] == -kInfinity) continue;
        const auto* value = block.data + n * block.step;
        for (int64_t v = 0; v < call_.V; ++v) out[v] += weights[n] * static_cast<float>(value[v]);
      }
    }
  }

  const Attention& call_;
  const int64_t group_, words_, rows_, width_;
  const std::unique_ptr<float[], Free> queries_, keys_, scores_, weights_, out_, rows_sums_;
  const std::unique_ptr<Scalar[], Free> lined_up_;
  alignas(64) float added_[kKeys] = {};  // by the mask
  Span span_ = {};
};

}  // namespace moe_metal
