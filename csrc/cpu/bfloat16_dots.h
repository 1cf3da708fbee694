// Products of packed numbers with few bfloat16 vectors, on processors with AVX512-BF16 and VBMI.
//
// Small integers, e2m1 and e4m3 are bfloat16 exactly, so a lookup makes operands of vdpbf16ps straight from the bytes,
// and a vector of them takes a third of the instructions that floats take. What a lookup gives has an order of its own,
// in which the tokens are laid out once. Sums are float: those of a group are scaled, and added up.
#pragma once
#include "codes.h"
#if defined(CPU_CAPABILITY_AVX512)

namespace moe_metal {

// 32 floats as bfloat16; past `count` are zeros.
[[MOE_METAL_BF16]] inline __m512i bfloat16s(const float* from, int64_t count) {
  const auto mask = [=](int64_t first) {
    return static_cast<__mmask16>(count >= first + 16 ? 0xffff : count <= first ? 0 : (1 << (count - first)) - 1);
  };
  const __m512 low = _mm512_maskz_loadu_ps(mask(0), from), high = _mm512_maskz_loadu_ps(mask(16), from + 16);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// 128 numbers of four bits: vector v has number 4 i + v in its place i.
class FourBits {
 public:
  static constexpr int64_t kColumns = 128, kBytes = 64;
  static constexpr int kVectors = 4;

  explicit FourBits(const FewBits& few) {
    alignas(64) at::BFloat16 values[32];
    for (int i = 0; i < 32; ++i)
      values[i] = few[i % 16];  // the lookup has 5 bits, of which the last is another number's
    table_ = _mm512_load_si512(values);
  }

  [[MOE_METAL_BF16, gnu::always_inline]] inline void operator()(__m512i bytes, __m512i (&out)[kVectors]) const {
    out[0] = _mm512_permutexvar_epi16(bytes, table_);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table_);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), table_);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 12), table_);
  }

  [[MOE_METAL_BF16]] static void lay_out(const float* x, int64_t count, at::BFloat16* to) {
    alignas(64) uint16_t fours[32];  // every fourth side by side
    for (int i = 0; i < 32; ++i) fours[i] = static_cast<uint16_t>(i % 8 * 4 + i / 8);
    __m512i part[4];
    for (int i = 0; i < 4; ++i) {
      part[i] = _mm512_permutexvar_epi16(_mm512_load_si512(fours), bfloat16s(x + 32 * i, count - 32 * i));
    }
    const __m512i a = _mm512_shuffle_i32x4(part[0], part[1], 0x88), b = _mm512_shuffle_i32x4(part[2], part[3], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(part[0], part[1], 0xdd), d = _mm512_shuffle_i32x4(part[2], part[3], 0xdd);
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(to + 32, _mm512_shuffle_i32x4(c, d, 0x88));
    _mm512_storeu_si512(to + 64, _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512(to + 96, _mm512_shuffle_i32x4(c, d, 0xdd));
  }

 private:
  __m512i table_;
};

// 64 e4m3: vector v has the numbers 16 l + 8 v to + 7 in its eighth l.
class EightBits {
 public:
  static constexpr int64_t kColumns = 64, kBytes = 64;
  static constexpr int kVectors = 2;

  EightBits() : EightBits(magnitudes().data()) {}
  // 128 of them.
  explicit EightBits(const at::BFloat16* magnitudes) {
    for (int half = 0; half < 2; ++half) {
      const __m512i first = _mm512_loadu_si512(magnitudes + 64 * half),
                    second = _mm512_loadu_si512(magnitudes + 64 * half + 32);
      low_[half] = bytes_of(first, second);
      high_[half] = bytes_of(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    }
  }

  [[MOE_METAL_BF16, gnu::always_inline]] inline void operator()(__m512i bytes, __m512i (&out)[kVectors]) const {
    const __m512i low = _mm512_permutex2var_epi8(low_[0], bytes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], bytes, high_[1]);
    constexpr int kOrWithSign = 0xf8;  // a | (b & c)
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, bytes, _mm512_set1_epi8(static_cast<char>(0x80)), kOrWithSign);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }

  [[MOE_METAL_BF16]] static void lay_out(const float* x, int64_t count, at::BFloat16* to) {
    const __m512i first = bfloat16s(x, count), second = bfloat16s(x + 32, count - 32);
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(first, second, 0x88));
    _mm512_storeu_si512(to + 32, _mm512_shuffle_i32x4(first, second, 0xdd));
  }

 private:
  static const std::array<at::BFloat16, 128>& magnitudes() {
    static const auto all = [] {
      std::array<at::BFloat16, 128> values;
      for (int i = 0; i < 128; ++i) {
        const int exponent = i >> 3, mantissa = i & 7;
        const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
        values[i] = i == 127 ? NAN : value;
      }
      return values;
    }();
    return all;
  }
  // The low bytes of 64 words.
  static __m512i bytes_of(__m512i first, __m512i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(second), 1);
  }

  __m512i low_[2], high_[2];
};

template <class Numbers, bool kOffset>
class BFloat16Dots {
 public:
  explicit BFloat16Dots(const Numbers& numbers) : numbers_(numbers) {}

  // Up to 4 tokens.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    if (!std::equal(tokens.x, tokens.x + tokens.count, laid_out_.begin(), laid_out_.end()))
      lay_out(tokens, rows.columns);
    if (tokens.count == 1) return all_rows<8, 1>(rows, tokens);
    if (tokens.count == 2) return all_rows<4, 2>(rows, tokens);
    tokens.count == 3 ? all_rows<2, 3>(rows, tokens) : all_rows<2, 4>(rows, tokens);
  }

 private:
  void lay_out(const Tokens& tokens, int64_t columns) {
    const int64_t chunks = at::divup(columns, Numbers::kColumns);
    x_.resize(tokens.count * chunks * Numbers::kColumns);
    for (int64_t n = 0; n < tokens.count; ++n) {
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t column = c * Numbers::kColumns;
        Numbers::lay_out(tokens.x[n] + column, columns - column, &x_[(n * chunks + c) * Numbers::kColumns]);
      }
    }
    laid_out_.assign(tokens.x, tokens.x + tokens.count);
  }

  template <int R, int N>
  void all_rows(const ScaledRows& rows, const Tokens& tokens) const {
    int64_t row = 0;
    for (; row + R <= rows.rows; row += R) some_rows<R, N>(rows, row, tokens);
    for (; row < rows.rows; ++row) some_rows<1, N>(rows, row, tokens);
  }

  template <int R, int N>
  [[MOE_METAL_BF16]] void some_rows(const ScaledRows& rows, int64_t first, const Tokens& tokens) const {
    constexpr int V = Numbers::kVectors;
    constexpr int64_t kColumns = Numbers::kColumns;
    const int64_t chunks = at::divup(rows.columns, kColumns), groups = std::max<int64_t>(kColumns >> rows.shift, 1);
    const uint8_t *data = rows.data + first * rows.row, *ahead = rows.ahead(first + 2 * R);
    const float *scales = rows.scales + first * rows.groups, *offsets = rows.offsets + first * rows.groups;
    // Lane i's numbers are neighbours, and it has the scale of their group.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i group_of_lane =
        _mm512_srli_epi32(lane, static_cast<unsigned>(std::countr_zero(uint64_t(16 / groups))));
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    const int64_t row_bytes = rows.columns * Numbers::kBytes / kColumns;
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t at = c * Numbers::kBytes, group = c * kColumns >> rows.shift;
      const __mmask64 bytes_left = row_bytes - at >= 64 ? ~0ull : (1ull << (row_bytes - at)) - 1;
      const auto groups_left = static_cast<__mmask16>((1u << std::min(groups, rows.groups - group)) - 1);
      __m512 plain[N];
      __m512i x[N][V];
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        plain[n] = _mm512_setzero_ps();
        MOE_METAL_UNROLL for (int v = 0; v < V; ++v) {
          x[n][v] = _mm512_loadu_si512(&x_[(n * chunks + c) * kColumns + 32 * v]);
          if constexpr (kOffset) plain[n] = dot(plain[n], ones, x[n][v]);
        }
      }
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        const uint8_t* here = data + r * rows.row + at;
        __builtin_prefetch(ahead + r * rows.row + at, 0, 2);
        __m512i numbers[V];
        numbers_(_mm512_maskz_loadu_epi8(bytes_left, here), numbers);
        const int64_t of_row = r * rows.groups + group;
        const __m512 scale = spread(group_of_lane, groups_left, scales + of_row);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          __m512 part = _mm512_setzero_ps();
          MOE_METAL_UNROLL for (int v = 0; v < V; ++v) part = dot(part, numbers[v], x[n][v]);
          sums[r][n] = _mm512_fmadd_ps(part, scale, sums[r][n]);
        }
        if constexpr (kOffset) {
          const __m512 offset = spread(group_of_lane, groups_left, offsets + of_row);
          MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = _mm512_fmadd_ps(plain[n], offset, sums[r][n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) tokens.out[n][first + r] = sum(Vec(sums[r][n]));
    }
  }

  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512 dot(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512 spread(__m512i to, __mmask16 which, const float* from) {
    return _mm512_permutexvar_ps(to, _mm512_maskz_loadu_ps(which, from));
  }

  Numbers numbers_;
  std::vector<at::BFloat16> x_;
  std::vector<const float*> laid_out_;  // the tokens of x_: they stay what they are as long as this lives
};

}  // namespace moe_metal
#endif
