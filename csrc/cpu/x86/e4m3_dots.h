// Products of e4m3 with few bfloat16 tokens, on processors with AVX512-VBMI.
//
// bfloat16 represents e4m3 exactly, so a table lookup converts bytes to operands of vdpbf16ps or, where that is slow,
// to floats. Its results are in a permuted order, in which the tokens are stored once. Sums are float: the sum of a
// group is scaled and added up.
#pragma once
#include <array>
#include <cmath>

#include "cpu/weights/scaled_rows.h"
#include "cpu/x86/plan.h"

namespace moe_metal {

// Converts 32 floats to bfloat16; from `count` on they are 0.
[[MOE_METAL_BF16]] inline __m512i bfloat16s(const float* from, int64_t count) {
  const auto mask = [=](int64_t first) {
    return static_cast<__mmask16>(count >= first + 16 ? 0xffff : count <= first ? 0 : (1 << (count - first)) - 1);
  };
  const __m512 low = _mm512_maskz_loadu_ps(mask(0), from), high = _mm512_maskz_loadu_ps(mask(16), from + 16);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// sums += products of pairs
[[MOE_METAL_BF16, gnu::always_inline]] inline __m512 bfloat16_dot(__m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Converts 64 e4m3 numbers: the l-th part of 16 bytes of vector v has the numbers 16 l + 8 v to 16 l + 8 v + 7.
class EightBits {
 public:
  static constexpr int64_t kColumns = 64;
  static constexpr int kVectors = 2;

  EightBits() : EightBits(magnitudes().data()) {}
  // magnitudes: the values of the 128 codes without sign.
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

 private:
  static const std::array<at::BFloat16, 128>& magnitudes() {
    static const auto all = [] {
      std::array<at::BFloat16, 128> values;
      for (int i = 0; i < 128; ++i) {
        const int exponent = i >> 3, mantissa = i & 7;
        const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
        values[i] = value;
      }
      values[127] = at::BFloat16(0x7fff, at::BFloat16::from_bits());  // NaN
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

// 64 numbers of a token as operands of vdpbf16ps, in the order of EightBits.
struct PairsOfBFloat16 {
  static constexpr int kVectors = 2;

  [[MOE_METAL_BF16]] static void lay_out(const float* x, int64_t count, char* to) {
    const __m512i first = bfloat16s(x, count), second = bfloat16s(x + 32, count - 32);
    _mm512_storeu_si512(to, _mm512_shuffle_i32x4(first, second, 0x88));
    _mm512_storeu_si512(to + 64, _mm512_shuffle_i32x4(first, second, 0xdd));
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline void convert(const __m512i (&numbers)[2], __m512i (&to)[2]) {
    to[0] = numbers[0], to[1] = numbers[1];
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512 product(const __m512i (&a)[2], const __m512i (&b)[2]) {
    return bfloat16_dot(bfloat16_dot(_mm512_setzero_ps(), a[0], b[0]), a[1], b[1]);
  }
};

// The same as floats: the even numbers of each vector of EightBits, then the odd ones.
struct Floats {
  static constexpr int kVectors = 4;

  static void lay_out(const float* x, int64_t count, char* to) {
    alignas(64) float all[kVectors][16];
    for (int64_t i = 0; i < EightBits::kColumns; ++i) {
      all[i / 8 % 2 * 2 + i % 2][i / 16 * 4 + i % 8 / 2] = i < count ? x[i] : 0;
    }
    std::memcpy(to, all, sizeof(all));
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline void convert(const __m512i (&numbers)[2], __m512i (&to)[4]) {
    MOE_METAL_UNROLL for (int v = 0; v < 2; ++v) {
      to[2 * v] = _mm512_slli_epi32(numbers[v], 16);
      to[2 * v + 1] = _mm512_and_si512(numbers[v], _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    }
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512 product(const __m512i (&a)[4], const __m512i (&b)[4]) {
    __m512 sums = _mm512_mul_ps(_mm512_castsi512_ps(a[0]), _mm512_castsi512_ps(b[0]));
    MOE_METAL_UNROLL for (int v = 1; v < 4; ++v) {
      sums = _mm512_fmadd_ps(_mm512_castsi512_ps(a[v]), _mm512_castsi512_ps(b[v]), sums);
    }
    return sums;
  }
};

// Group columns share a scale.
template <int Group>
class E4m3Dots {
 public:
  static constexpr bool kReadsScales = false;
  static bool available() { return vbmi_available(); }
  static bool takes(const ScaledRows&, int64_t tokens) { return available() && tokens <= kFewTokens; }
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    // On an Emerald Rapids `linear` with floats takes 0.97, 0.85, 0.81 and 0.77 of the time for one to four tokens, but
    // experts with one token, which wait for memory, 1.02 to 1.06 of the time.
    const bool pairs = bfloat16_is_fast() || (bfloat16_available() && tokens.count == 1);
    pairs ? multiply<PairsOfBFloat16>(rows, tokens, pairs_) : multiply<Floats>(rows, tokens, floats_);
  }

 private:
  static constexpr int64_t kColumns = EightBits::kColumns;  // of a chunk, which has one group or two
  static_assert(Group % kColumns == 0 || Group == kColumns / 2);

  template <class Operands>
  void multiply(const ScaledRows& rows, const Tokens& tokens, PreparedTokenCache& cache) {
    constexpr int64_t kBytes = Operands::kVectors * 64;
    const int64_t bytes = at::divup(rows.columns, kColumns) * kBytes;
    const auto forms = cache.look_up_each<kFewTokens>(tokens, bytes, [&](const float* x, char* form) {
      for (int64_t c = 0; c < rows.columns; c += kColumns, form += kBytes) {
        Operands::lay_out(x + c, rows.columns - c, form);
      }
      return bytes;
    });
    for (int64_t n = 0; n < tokens.count; n += 4) {
      constexpr decltype(&E4m3Dots::all_rows<Operands, 8, 1>) kWays[] = {
          &E4m3Dots::all_rows<Operands, 8, 1>, &E4m3Dots::all_rows<Operands, 4, 2>, &E4m3Dots::all_rows<Operands, 2, 3>,
          &E4m3Dots::all_rows<Operands, 2, 4>};
      (this->*kWays[std::min<int64_t>(4, tokens.count - n) - 1])(rows, &forms[n], tokens.out + n);
    }
  }

  template <class Operands, int R, int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    rows.for_blocks<R>([&](auto r, int64_t first, const uint8_t* ahead) {
      multiply_block<Operands, r, N>(rows, first, ahead, forms, out);
    });
  }

  // With Floats, the compiler finds nothing to use AVX512-BF16 for, so the processor need not have it.
  template <class Operands, int R, int N>
  [[MOE_METAL_BF16]] void multiply_block(const ScaledRows& rows, int64_t first, const uint8_t* ahead,
                                         const char* const* forms, float* const* out) const {
    const uint8_t* data = rows.data + first * rows.row;
    const float* scales = rows.scales + first * rows.groups;
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
    }
    const int64_t whole = rows.columns / kColumns;
    for (int64_t c = 0; c < whole; ++c) {
      add_chunk<Operands>(rows, data, scales, ahead, c, kColumns, forms, sums);
    }
    if (const int64_t left = rows.columns % kColumns; left > 0) {
      add_chunk<Operands>(rows, data, scales, ahead, whole, left, forms, sums);
    }
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) out[n][first + r] = sum(Vec(sums[r][n]));
    }
  }

  // Adds the products of chunk c, which has `count` columns, and prefetches as much.
  template <class Operands, int R, int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void add_chunk(const ScaledRows& rows, const uint8_t* data,
                                                               const float* scales, const uint8_t* ahead, int64_t c,
                                                               int64_t count, const char* const* forms,
                                                               __m512 (&sums)[R][N]) const {
    constexpr int V = Operands::kVectors;
    const int64_t column = c * kColumns;
    const __mmask64 bytes = count < kColumns ? (1ull << count) - 1 : ~0ull;
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      __builtin_prefetch(ahead + R * column + r * kLine, 0, 2);
      __m512i numbers[EightBits::kVectors], operands[V];
      numbers_(_mm512_maskz_loadu_epi8(bytes, data + r * rows.row + column), numbers);
      Operands::convert(numbers, operands);
      const float* scales_of_row = scales + r * rows.groups + column / Group;
      __m512 scale = _mm512_set1_ps(*scales_of_row);
      if (Group < kColumns && count > Group) {  // the upper half of the lanes has the columns from 32 on
        scale = _mm512_mask_mov_ps(scale, 0xff00, _mm512_set1_ps(scales_of_row[1]));
      }
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        __m512i x[V];
        MOE_METAL_UNROLL for (int v = 0; v < V; ++v) x[v] = _mm512_load_si512(forms[n] + column * V + v * 64);
        sums[r][n] = _mm512_fmadd_ps(Operands::product(operands, x), scale, sums[r][n]);
      }
    }
  }

  EightBits numbers_;
  PreparedTokenCache pairs_, floats_;
};

}  // namespace moe_metal
