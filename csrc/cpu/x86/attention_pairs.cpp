// `attention` in bfloat16 on processors with AVX512-BF16: products of pairs of bfloat16.
#include "cpu/attention/attention_by_tiles.h"
#include "cpu/processor_ways.h"
#include "cpu/x86/processor.h"

namespace moe_metal {
namespace {

int32_t pair_at(const at::BFloat16* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof(both));
  return both;
}

// The scores of N vectors of rows with K keys, like score_floats(): a word is two bfloat16, whose products are exact in
// float.
template <int N, int K>
[[MOE_METAL_BF16, gnu::noinline]] void score_pairs(const float* queries, int64_t words, int64_t lanes,
                                                   const at::BFloat16* keys, int64_t step, const at::BFloat16* ahead,
                                                   float* scores) {
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
[[MOE_METAL_BF16, gnu::noinline]] void score_pairs_of_8(const float* queries, int64_t words, const at::BFloat16* keys,
                                                        int64_t step, const at::BFloat16* ahead, float* scores) {
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

Vec as_floats(__m512i weights) { return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16))); }

// Computes the weights of 16 lanes for all keys; a word has the weights of two keys. -> their sums. some_barred becomes
// true if any key is masked.
[[MOE_METAL_BF16, gnu::noinline]] Vec weigh_pairs(const float* scores, int64_t lanes, const Vec& greatest,
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

// out = out * factor + weights @ values for R rows and 32 columns, two keys at a time. The columns' sums are in the
// order of unpacked pairs: see index_of().
template <int R>
[[MOE_METAL_BF16, gnu::noinline]] void add_pairs(const at::BFloat16* values, int64_t step, int64_t keys,
                                                 const float* weights, int64_t lanes, const float* factors, float* out,
                                                 int64_t width, bool ahead, int64_t columns) {
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

// See FloatProducts. A word is two bfloat16: two columns of keys, or the weights of two keys.
struct PairProducts {
  using Scalar = at::BFloat16;
  using Key = at::BFloat16;

  // Up to 8 rows, as in decoding with most models, take half a vector. A vector then has two words of each row.
  static int64_t lanes_of(int64_t rows) { return rows <= 8 ? 8 : at::divup(rows, kLanes) * kLanes; }
  static int64_t words_of(int64_t columns, int64_t lanes) {
    return lanes == 8 ? at::divup(columns, 4) * 2 : at::divup(columns, 2);
  }
  static int64_t columns_together(int64_t lanes) { return lanes == 8 ? 4 : 2; }

  static void multiply_keys(const float* queries, int64_t words, int64_t lanes, const Key* keys, int64_t step,
                            const Key* ahead, float* scores) {
    constexpr int K = kSumsAtOnce;
    if (lanes == 8) return score_pairs_of_8<2 * K>(queries, words, keys, step, ahead, scores);
    int64_t r = 0;
    for (; r + 2 * kLanes <= lanes; r += 2 * kLanes) {
      score_pairs<2, K>(queries + r, words, lanes, keys, step, ahead, scores + r);
      score_pairs<2, K>(queries + r, words, lanes, keys + K * step, step, ahead, scores + K * lanes + r);
    }
    if (r < lanes) score_pairs<1, 2 * K>(queries + r, words, lanes, keys, step, ahead, scores + r);
  }

  static Vec weigh(const float* scores, int64_t lanes, const Vec& greatest, float* weights, bool& some_barred) {
    return weigh_pairs(scores, lanes, greatest, weights, some_barred);
  }

  template <int R>
  static void add_values(const Scalar* values, int64_t step, int64_t keys, const float* weights, int64_t lanes,
                         const float* factors, float* out, int64_t width, bool ahead, int64_t columns) {
    for (int64_t v = 0; v < columns; v += 32) {
      add_pairs<R>(values + v, step, keys, weights, lanes, factors, out + v, width, ahead, columns - v);
    }
  }

  static float weight(const float* weights, int64_t lanes, int64_t n) {
    return reinterpret_cast<const at::BFloat16*>(weights + n / 2 * lanes)[n % 2];
  }
  // Column v of 32 is at this index in the interleaved order of add_pairs().
  static int64_t index_of(int64_t column) {
    const int64_t v = column % 32;
    return column - v + v / 4 % 2 * 16 + v / 8 * 4 + v % 4;
  }
  static void order(float* out, int64_t count) {
    for (; count > 0; count -= 32, out += 32) {
      float sums[32];
      std::memcpy(sums, out, sizeof(sums));
      for (int64_t v = 0; v < 32; ++v) out[v] = sums[index_of(v)];
    }
  }
};

bool attention_by_pairs(const Attention& call) {
  if (call.q.scalar_type() != at::kBFloat16 || !bfloat16_available()) return false;
  attention_by_tiles<PairProducts>(call);
  return true;
}

[[maybe_unused]] const bool kOffered = (processor_ways().attention = attention_by_pairs, true);

}  // namespace
}  // namespace moe_metal
