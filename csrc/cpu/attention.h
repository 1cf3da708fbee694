// `attention` of some queries over some keys, block by block, with an online softmax.
//
// A row is one query of one head. A tile has rows of all heads that share a key head, so a block of keys and values is
// read once for all of them. Rows are along the lanes of vectors: queries are transposed once, keys and values are used
// in place, and nothing is summed across lanes.
#pragma once
#include <cmath>
#include <limits>

#include "contract/attention.h"
#include "cpu/vector/vec.h"

namespace moe_metal {

constexpr int64_t kRows = 128, kKeys = 64;  // the most rows of a tile, and keys of a block
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How many rows or keys have their sums in registers, two vectors each.
constexpr int kSumsAtOnce = kVectorRegisters / 4;

// The scores of N vectors of rows with K keys; key k is at keys + k * step. A word is a float, or two bfloat16, whose
// products are exact in float. The n-th vector of a word is queries[word * lanes + n * kLanes ...]. With few rows
// memory is the limit, so they prefetch the next keys, from `ahead` on, one line for each word.
template <int N, int K>
[[gnu::flatten, gnu::noinline]] inline void dot_floats(const float* queries, int64_t words, int64_t lanes,
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

#ifdef MOE_METAL_HAS_AVX512
inline int32_t pair_at(const at::BFloat16* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof(both));
  return both;
}

template <int N, int K>
[[MOE_METAL_BF16, gnu::noinline]] inline void dot_pairs(const float* queries, int64_t words, int64_t lanes,
                                                        const at::BFloat16* keys, int64_t step,
                                                        const at::BFloat16* ahead, float* scores) {
  __m512 sums[K][N];
  MOE_METAL_UNROLL for (int i = 0; i < K * N; ++i) sums[i / N][i % N] = _mm512_setzero_ps();
  for (int64_t w = 0; w < words; ++w) {
    if (N == 1) __builtin_prefetch(ahead + w % K * step + w / K * 32, 0, 2);
    __m512bh query[N];
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      query[n] = reinterpret_cast<__m512bh>(_mm512_load_ps(queries + w * lanes + n * kLanes));
    }
    MOE_METAL_UNROLL for (int k = 0; k < K; ++k) {
      const auto key = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair_at(keys + k * step + 2 * w)));
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[k][n] = _mm512_dpbf16_ps(sums[k][n], key, query[n]);
    }
  }
  MOE_METAL_UNROLL for (int i = 0; i < K * N; ++i) {
    _mm512_store_ps(scores + i / N * lanes + i % N * kLanes, sums[i / N][i % N]);
  }
}

// The same for up to 8 rows, as in decoding with most models. A vector has two words of each row: lanes 2r and 2r + 1
// are for row r.
template <int K>
[[MOE_METAL_BF16, gnu::noinline]] inline void dot_pairs_of_8(const float* queries, int64_t words,
                                                             const at::BFloat16* keys, int64_t step,
                                                             const at::BFloat16* ahead, float* scores) {
  __m512 sums[K];
  MOE_METAL_UNROLL for (int k = 0; k < K; ++k) sums[k] = _mm512_setzero_ps();
  const at::BFloat16* third[K / 3 + 1];  // one pointer for three keys: more do not fit into registers
  MOE_METAL_UNROLL for (int i = 0; i <= K / 3; ++i) third[i] = keys + 3 * i * step;
  for (int64_t w = 0; w < words; w += 2) {
    __builtin_prefetch(ahead + w % K * step + w / K * 32, 0, 2);
    __builtin_prefetch(ahead + (w % K + 1) * step + w / K * 32, 0, 2);
    const auto query = reinterpret_cast<__m512bh>(_mm512_load_ps(queries + w * 8));
    MOE_METAL_UNROLL for (int k = 0; k < K; ++k) {
      int64_t both;
      std::memcpy(&both, third[k / 3] + k % 3 * step + 2 * w, sizeof(both));
      sums[k] = _mm512_dpbf16_ps(sums[k], reinterpret_cast<__m512bh>(_mm512_set1_epi64(both)), query);
    }
  }
  MOE_METAL_UNROLL for (int k = 0; k < K; ++k) {
    const __m512i sum = _mm512_castps_si512(_mm512_add_ps(sums[k], _mm512_movehdup_ps(sums[k])));
    _mm256_store_ps(scores + k * 8, _mm256_castsi256_ps(_mm512_cvtepi64_epi32(sum)));
  }
}

// e^(score - greatest) in bfloat16, in the lower half of each lane.
[[MOE_METAL_BF16, gnu::always_inline]] inline __m512i weights_of(const Vec& score, const Vec& greatest) {
  const auto weight = _mm512_cvtneps_pbh(exp2((score - greatest) * Vec(1.44269504f)));
  return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(weight));
}

inline Vec as_floats(__m512i weights) { return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16))); }

// Computes the weights of 16 lanes for all keys; a word has the weights of two keys. -> their sums. some_barred becomes
// true if any key is masked.
[[MOE_METAL_BF16, gnu::noinline]] inline Vec weigh_pairs(const float* scores, int64_t lanes, const Vec& greatest,
                                                         float* weights, bool& some_barred) {
  const Vec none(-kInfinity);
  Vec sums(0), barred(0);
  const int64_t step = lanes == 8 ? 16 : 2 * lanes;
  for (int64_t at = 0; at < kKeys * lanes; at += step) {
    const Vec score = load(scores + at, Whole());
    const __m512i first = weights_of(score, greatest);
    barred = barred | (score == none);
    sums = sums + as_floats(first);
    if (lanes == 8) {  // the vector has both keys
      const __m256i second = _mm512_extracti64x4_epi64(first, 1);
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights + at / 2),
                         _mm256_or_si256(_mm512_castsi512_si256(first), _mm256_slli_epi32(second, 16)));
      continue;
    }
    const Vec next = load(scores + at + lanes, Whole());
    const __m512i second = weights_of(next, greatest);
    barred = barred | (next == none);
    sums = sums + as_floats(second);
    _mm512_store_si512(weights + at / 2, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
  some_barred |= barred.zero_mask() != (1 << kLanes) - 1;
  return sums;
}

// add_values for two keys at a time, R rows and 32 columns. The order of the columns' sums is that of unpacked pairs.
template <int R>
[[MOE_METAL_BF16, gnu::noinline]] inline void add_pairs(const at::BFloat16* values, int64_t step, int64_t keys,
                                                        const float* weights, int64_t lanes, const float* factors,
                                                        float* out, int64_t width, bool ahead, int64_t columns) {
  const auto seen = static_cast<__mmask32>(columns >= 32 ? ~0u : (1u << columns) - 1);
  __m512 sums[R][2];
  MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
    MOE_METAL_UNROLL for (int c = 0; c < 2; ++c) {
      sums[r][c] = _mm512_mul_ps(_mm512_load_ps(out + r * width + c * kLanes), _mm512_set1_ps(factors[r]));
    }
  }
  for (int64_t key = 0; key < keys; key += 2) {
    const at::BFloat16* here = values + key * step;
    if (ahead) {
      __builtin_prefetch(here + kKeys * step, 0, 2);
      __builtin_prefetch(here + (kKeys + 1) * step, 0, 2);
    }
    const __m512i one = _mm512_maskz_loadu_epi16(seen, here);
    const __m512i other = _mm512_maskz_loadu_epi16(key + 1 < keys ? seen : 0, here + step);
    const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(one, other));
    const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(one, other));
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_ps(weights[key / 2 * lanes + r]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], weight, low);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], weight, high);
    }
  }
  MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
    MOE_METAL_UNROLL for (int c = 0; c < 2; ++c) _mm512_store_ps(out + r * width + c * kLanes, sums[r][c]);
  }
}

// The place of column v of 32 in that order.
constexpr int64_t place_of_sum(int64_t v) { return v / 4 % 2 * 16 + v / 8 * 4 + v % 4; }

inline void order_sums(float* out) {
  float sums[32];
  std::memcpy(sums, out, sizeof(sums));
  for (int64_t v = 0; v < 32; ++v) out[v] = sums[place_of_sum(v)];
}
#endif

// out = out * factor + weights @ values, for R rows and C vectors of the values' columns. `ahead`: prefetch the next
// block.
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

// Some rows of one sequence and key head, and a range of keys.
struct Span {
  int64_t sequence, head;
  int64_t first_row, rows;
  int64_t first_key, last_key;
};

// The state of a row: its greatest score, the sum of e^(score - greatest), and the sum of values times these weights.
struct Sums {
  float greatest, total;
  const float* values;
};

// Each thread has its own. `pairs`: words of two bfloat16, on processors with AVX512-BF16.
template <class Scalar, bool pairs>
class AttentionTile {
 public:
  explicit AttentionTile(const Attention& call)
      : call_(call),
        group_(call.A / call.J),
        lanes_(lanes_of(std::min(kRows, group_ * call.T))),
        words_(!pairs        ? call.D
               : lanes_ == 8 ? at::divup(call.D, 4) * 2
                             : at::divup(call.D, 2)),
        period_(std::max(lanes_, kLanes)),
        width_(at::divup(call.V, 2 * kLanes) * 2 * kLanes),
        queries_(scratch<float>(words_ * lanes_)),
        scores_(scratch<float>(kKeys * lanes_)),
        weights_(scratch<float>(kKeys * lanes_)),
        added_(scratch<float>(call.mask.defined() ? kKeys * lanes_ : 0)),
        out_(scratch<float>(lanes_ * width_)),
        of_rows_(scratch<float>(5 * period_)),
        keys_(scratch<Key>(kKeys * key_size())),
        values_(scratch<Scalar>(call.v.stride(3) == 1 ? 0 : kKeys * call.V)) {}

  // Prefetches the first keys and values of a span, with few rows.
  void prefetch(const Span& span) const {
    if (lanes_ > kLanes) return;
    for (const Tensor* tensor : {&call_.k, &call_.v}) {
      const int64_t bytes = tensor->size(3) * sizeof(Scalar);
      for (int64_t key = span.first_key; key < std::min(span.first_key + kKeys, span.last_key); ++key) {
        const auto* row = reinterpret_cast<const char*>(place(*tensor, span, key));
        for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
      }
    }
  }

  // The keys and values of `next` are prefetched meanwhile.
  void operator()(const Span& span, const Span& next) {
    span_ = span;
    read_queries();
    std::fill_n(greatest(), period_, -kInfinity);
    std::fill_n(totals(), period_, 0.0f);
    std::fill_n(out_.get(), span.rows * width_, 0.0f);
    for (int64_t key = span.first_key; key < span.last_key; key += kKeys) {
      const int64_t count = std::min(kKeys, span.last_key - key);
      if (key + kKeys >= span.last_key) prefetch(next);
      multiply_keys(key, count);
      const bool some_barred = weigh(key, count);
      multiply_values(key, count, some_barred);
    }
#ifdef MOE_METAL_HAS_AVX512
    for (int64_t at = 0; pairs && at < span.rows * width_; at += 32) order_sums(out_.get() + at);
#endif
  }

  Sums sums(int64_t r) const {
    float total = 0;
    for (int64_t i = r; i < period_; i += lanes_) total += totals()[i];
    return {greatest()[r], total, out_.get() + r * width_};
  }

 private:
  using Key = std::conditional_t<pairs, at::BFloat16, float>;

  // The lanes for so many rows. With `pairs`, up to 8 rows take half a vector.
  static int64_t lanes_of(int64_t rows) { return pairs && rows <= 8 ? 8 : at::divup(rows, kLanes) * kLanes; }
  int64_t key_size() const { return pairs ? 2 * words_ : words_; }
  int64_t query_of(int64_t r) const { return (span_.first_row + r) / group_; }
  int64_t head_of(int64_t r) const { return span_.head * group_ + (span_.first_row + r) % group_; }

  // One number per row; with 8 lanes they are repeated to fill a vector.
  float* greatest() const { return of_rows_.get(); }
  float* totals() const { return of_rows_.get() + period_; }
  float* factors() const { return of_rows_.get() + 2 * period_; }
  float* first_keys() const { return of_rows_.get() + 3 * period_; }  // the range of keys of a block that a row sees
  float* last_keys() const { return of_rows_.get() + 4 * period_; }

  // Transposes the queries for the products: a vector has the same word of all rows, or two words of 8 rows.
  void read_queries() {
    const int64_t together = (pairs && lanes_ == 8 ? 2 : 1) * static_cast<int64_t>(sizeof(float) / sizeof(Key));
    const int64_t row = lanes_ * together, step = call_.q.stride(3);
    auto* const queries = reinterpret_cast<Key*>(queries_.get());
    std::fill_n(queries_.get(), words_ * lanes_, 0.0f);
    for (int64_t r = 0; r < span_.rows; ++r) {
      const auto* from = elements<Scalar>(call_.q) + span_.sequence * call_.q.stride(0) +
                         head_of(r) * call_.q.stride(1) + query_of(r) * call_.q.stride(2);
      Key* to = queries + r * together;
      int64_t d = 0;
      for (; d + 4 <= call_.D && together == 4 && step == 1; d += 4, to += row)
        std::memcpy(to, from + d, 4 * sizeof(Key));
      for (; d < call_.D; to += row) {
        for (int64_t i = 0; i < together && d < call_.D; ++i, ++d) to[i] = static_cast<Key>(from[d * step]);
      }
    }
  }

  // Rows with contiguous elements, and their stride.
  template <class Element>
  struct Block {
    const Element* data;
    int64_t step;
  };
  static const Scalar* place(const Tensor& tensor, const Span& span, int64_t key) {
    return elements<Scalar>(tensor) + span.sequence * tensor.stride(0) + span.head * tensor.stride(1) +
           key * tensor.stride(2);
  }

  // Keys in place if they consist of words and fill whole groups; otherwise a copy, padded with 0.
  Block<Key> keys_of(int64_t key, int64_t count) {
    const int64_t size = key_size(), step = call_.k.stride(2), column = call_.k.stride(3), D = call_.D;
    const auto* from = place(call_.k, span_, key);
    if constexpr (std::is_same_v<Key, Scalar>) {
      if (column == 1 && size == D && count % (2 * kSumsAtOnce) == 0) return {from, step};
    }
    std::fill_n(keys_.get(), kKeys * size, Key(0));
    for (int64_t n = 0; n < count; ++n) {
      if constexpr (!pairs) {
        if (column == 1) {
          for_each_vector(D, [&](int64_t d, auto columns) {
            store(&keys_[n * size + d], load(from + n * step + d, columns), columns);
          });
          continue;
        }
      }
      for (int64_t d = 0; d < D; ++d) keys_[n * size + d] = static_cast<Key>(from[n * step + d * column]);
    }
    return {keys_.get(), size};
  }

  Block<Scalar> values_of(int64_t key, int64_t count) {
    const int64_t step = call_.v.stride(2), column = call_.v.stride(3), V = call_.V;
    const auto* from = place(call_.v, span_, key);
    if (column == 1) return {from, step};
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t v = 0; v < V; ++v) values_[n * V + v] = from[n * step + v * column];
    }
    return {values_.get(), V};
  }

  void multiply_keys(int64_t key, int64_t count) {
    const Block<Key> block = keys_of(key, count);
    const int64_t next = key + kKeys < span_.last_key ? kKeys * block.step : 0;
    for (int64_t first = 0; first < count; first += 2 * kSumsAtOnce) {
      const Key* keys = block.data + first * block.step;
      multiply_keys(keys, block.step, keys + next, scores_.get() + first * lanes_);
    }
  }

  // The scores of a group of keys with all rows.
  void multiply_keys(const Key* keys, int64_t step, const Key* ahead, float* scores) const {
    constexpr int K = kSumsAtOnce;
    int64_t r = 0;
#ifdef MOE_METAL_HAS_AVX512
    if constexpr (pairs) {
      if (lanes_ == 8) return dot_pairs_of_8<2 * K>(queries_.get(), words_, keys, step, ahead, scores);
      for (; r + 2 * kLanes <= lanes_; r += 2 * kLanes) {
        dot_pairs<2, K>(queries_.get() + r, words_, lanes_, keys, step, ahead, scores + r);
        dot_pairs<2, K>(queries_.get() + r, words_, lanes_, keys + K * step, step, ahead, scores + K * lanes_ + r);
      }
      if (r < lanes_) dot_pairs<1, 2 * K>(queries_.get() + r, words_, lanes_, keys, step, ahead, scores + r);
      return;
    }
#endif
    if constexpr (!pairs) {
      for (; r + 2 * kLanes <= lanes_; r += 2 * kLanes) {
        dot_floats<2, K>(queries_.get() + r, words_, lanes_, keys, step, ahead, scores + r);
        dot_floats<2, K>(queries_.get() + r, words_, lanes_, keys + K * step, step, ahead, scores + K * lanes_ + r);
      }
      if (r < lanes_) dot_floats<1, 2 * K>(queries_.get() + r, words_, lanes_, keys, step, ahead, scores + r);
    }
  }

  // Converts scores to weights relative to the greatest score so far. -> whether any key is masked for any row
  bool weigh(int64_t key, int64_t count) {
    const int64_t last_query = query_of(span_.rows - 1);
    const bool at_an_edge =
        count < kKeys || call_.first_key(last_query) > key || call_.last_key(query_of(0)) < key + kKeys;
    if (at_an_edge) find_edges(key, count);
    masked_ = call_.mask.defined() && !sees_all(key, count);
    if (masked_) read_mask(key, count);
    bool some_barred = false;
    for (int64_t lane = 0; lane < period_; lane += kLanes) {
      const Vec greatest_of_block = bend_and_bar(lane, at_an_edge);
      some_barred |= softmax(lane, greatest_of_block);
    }
    return some_barred;
  }

  void find_edges(int64_t key, int64_t count) {
    for (int64_t i = 0; i < period_; ++i) {
      const int64_t t = query_of(std::min(i % lanes_, span_.rows - 1));
      first_keys()[i] = static_cast<float>(std::clamp<int64_t>(call_.first_key(t) - key, 0, kKeys));
      last_keys()[i] = static_cast<float>(std::clamp<int64_t>(call_.last_key(t) - key, 0, count));
    }
  }

  // The offset of the mask of row `r` for a key.
  int64_t mask_of(int64_t r, int64_t key) const {
    const Tensor& mask = call_.mask;
    return span_.sequence * mask.stride(0) + head_of(r) * mask.stride(1) + query_of(r) * mask.stride(2) +
           key * mask.stride(3);
  }

  // Whether a bool mask excludes nothing here. In decoding it is one row for all heads, and usually only excludes
  // padding before a prompt.
  bool sees_all(int64_t key, int64_t count) const {
    if (call_.mask.scalar_type() != at::kBool) return false;
    const auto* seen = elements<bool>(call_.mask);
    const int64_t step = call_.mask.stride(3);
    const int64_t rows = call_.T == 1 && call_.mask.stride(1) == 0 ? 1 : span_.rows;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = mask_of(r, key);
      if (step == 1) {
        if (std::memchr(seen + at, false, count) != nullptr) return false;
      } else {
        for (int64_t n = 0; n < count; ++n) {
          if (!seen[at + n * step]) return false;
        }
      }
    }
    return true;
  }

  void read_mask(int64_t key, int64_t count) {
    const Tensor& mask = call_.mask;
    const int64_t step = mask.stride(3);
    const auto read = [&](auto number) {
      for (int64_t r = 0; r < span_.rows; ++r) {
        const int64_t at = mask_of(r, key);
        for (int64_t n = 0; n < count; ++n) added_[n * lanes_ + r] = number(at + n * step);
      }
    };
    if (mask.scalar_type() == at::kBool) {
      return read([seen = elements<bool>(mask)](int64_t i) { return seen[i] ? 0.0f : -kInfinity; });
    }
    with_dtype(mask.scalar_type(), [&](auto scalar) {
      read([from = elements<decltype(scalar)>(mask)](int64_t i) { return static_cast<float>(from[i]); });
    });
  }

  // Applies scale, softcap, mask and causality to scores of some rows. Masked scores become -inf, even if they are NaN.
  // -> the greatest scores
  Vec bend_and_bar(int64_t lane, bool at_an_edge) {
    const Vec softcap(call_.softcap), none(-kInfinity), first = load(first_keys() + lane, Whole()),
                                                        last = load(last_keys() + lane, Whole());
    const Vec scale(call_.scale);
    alignas(64) float key_of_lane[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) key_of_lane[i] = static_cast<float>(i / lanes_);
    Vec key = load(key_of_lane, Whole()), greatest = none;
    const Vec keys_at_once(static_cast<float>(period_ / lanes_));
    for (int64_t at = lane; at < kKeys * lanes_; at += period_, key = key + keys_at_once) {
      Vec score = load(scores_.get() + at, Whole()) * scale;
      if (call_.softcap != 0) score = softcap * (score / softcap).tanh();
      if (masked_) {
        const Vec added = load(added_.get() + at, Whole());
        score = Vec::blendv(score + added, none, added == none);
      }
      if (at_an_edge) score = Vec::blendv(score, none, (key < first) | (key >= last));
      store(scores_.get() + at, score, Whole());
      greatest = at::vec::maximum(greatest, score);
    }
    return greatest;
  }

  // -> whether any key is masked
  bool softmax(int64_t lane, const Vec& greatest_of_block) {
    const Vec none(-kInfinity), before = load(greatest() + lane, Whole());
    const Vec now = at::vec::maximum(before, over_lanes(greatest_of_block));
    // The score whose weight is 1. Rows without keys get weights of 0.
    const Vec one = Vec::blendv(now, Vec(0), now == none);
    const auto power = [&](const Vec& score) { return exp2((score - one) * Vec(1.44269504f)); };
    Vec sums(0), barred(0);
    bool some_barred = false;
#ifdef MOE_METAL_HAS_AVX512
    if constexpr (pairs) sums = weigh_pairs(scores_.get() + lane, lanes_, one, weights_.get() + lane, some_barred);
#endif
    for (int64_t at = lane; !pairs && at < kKeys * lanes_; at += period_) {
      const Vec score = load(scores_.get() + at, Whole()), weight = power(score);
      barred = barred | (score == none);
      sums = sums + weight;
      store(weights_.get() + at, weight, Whole());
    }
    const Vec factor = Vec::blendv(power(before), Vec(1), before == now);
    store(factors() + lane, factor, Whole());
    store(greatest() + lane, now, Whole());
    store(totals() + lane, at::vec::fmadd(load(totals() + lane, Whole()), factor, sums), Whole());
    return some_barred || barred.zero_mask() != (1 << kLanes) - 1;
  }

  // The greatest of the lanes of each row.
  Vec over_lanes(const Vec& vec) const {
    if (lanes_ >= kLanes) return vec;
    alignas(64) float two[2 * kLanes];
    store(two, vec, Whole());
    store(two + kLanes, vec, Whole());
    return at::vec::maximum(vec, Vec::loadu(two + lanes_));
  }

  void multiply_values(int64_t key, int64_t count, bool some_barred) {
    const Block<Scalar> block = values_of(key, count);
    if (some_barred && !is_finite(block, count)) return add_seen_values(block, count);
    int64_t r = 0;
    for (; r + kSumsAtOnce <= span_.rows; r += kSumsAtOnce) add_values_of_rows<kSumsAtOnce>(r, block, count);
    if constexpr (kSumsAtOnce > 4) {
      for (; r + 4 <= span_.rows; r += 4) add_values_of_rows<4>(r, block, count);
    }
    for (; r + 2 <= span_.rows; r += 2) add_values_of_rows<2>(r, block, count);
    for (; r < span_.rows; ++r) add_values_of_rows<1>(r, block, count);
  }

  template <int R>
  void add_values_of_rows(int64_t r, const Block<Scalar>& block, int64_t count) {
#ifdef MOE_METAL_HAS_AVX512
    if constexpr (pairs) {
      for (int64_t v = 0; v < call_.V; v += 32) {
        add_pairs<R>(block.data + v, block.step, count, weights_.get() + r, lanes_, factors() + r,
                     out_.get() + r * width_ + v, width_, r == 0, call_.V - v);
      }
      return;
    }
#endif
    const auto add = [&](int64_t v, auto vectors, auto columns) {
      add_values<R, vectors>(block.data + v, block.step, count, weights_.get() + r, lanes_, factors() + r,
                             out_.get() + r * width_ + v, width_, r == 0, columns);
    };
    int64_t v = 0;
    for (; v + 2 * kLanes <= call_.V; v += 2 * kLanes) add(v, std::integral_constant<int, 2>(), Whole());
    for_each_vector(call_.V - v,
                    [&](int64_t i, auto columns) { add(v + i, std::integral_constant<int, 1>(), columns); });
  }

  bool is_finite(const Block<Scalar>& block, int64_t count) const {
    Vec zero(0);
    for (int64_t n = 0; n < count; ++n) {
      for_each_vector(call_.V, [&](int64_t v, auto columns) {
        zero = at::vec::fmadd(load(block.data + n * block.step + v, columns), Vec(0), zero);
      });
    }
    return sum(zero) == 0;
  }

  // The weight of key n for row r.
  float weight(int64_t n, int64_t r) const {
    if constexpr (!pairs) return weights_[n * lanes_ + r];
    return reinterpret_cast<const at::BFloat16*>(weights_.get() + n / 2 * lanes_ + r)[n % 2];
  }

  // The place of a column's sum until all keys are added.
  static int64_t place_of(int64_t v) {
#ifdef MOE_METAL_HAS_AVX512
    if constexpr (pairs) return v / 32 * 32 + place_of_sum(v % 32);
#endif
    return v;
  }

  // If a value is infinite or NaN, a weight of 0 would give NaN, so masked keys are skipped.
  void add_seen_values(const Block<Scalar>& block, int64_t count) {
    for (int64_t r = 0; r < span_.rows; ++r) {
      float* out = out_.get() + r * width_;
      for (int64_t v = 0; v < width_; ++v) out[v] *= factors()[r];
      for (int64_t n = 0; n < count; ++n) {
        if (scores_[n * lanes_ + r] == -kInfinity) continue;
        const auto* value = block.data + n * block.step;
        for (int64_t v = 0; v < call_.V; ++v) out[place_of(v)] += weight(n, r) * static_cast<float>(value[v]);
      }
    }
  }

  const Attention& call_;
  const int64_t group_;
  const int64_t lanes_;   // lanes of the scores of a key
  const int64_t words_;   // words of a query, and of a key
  const int64_t period_;  // lanes after which rows repeat: at least a vector
  const int64_t width_;   // of a row of the output sums
  const std::unique_ptr<float[], Free> queries_, scores_, weights_, added_, out_, of_rows_;
  const std::unique_ptr<Key[], Free> keys_;
  const std::unique_ptr<Scalar[], Free> values_;
  Span span_ = {};
  bool masked_ = false;  // whether the mask affects this block
};

}  // namespace moe_metal
