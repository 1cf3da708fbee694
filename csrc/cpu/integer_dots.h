// Products of numbers of 4 bits with few tokens, on processors with AVX512-VNNI.
//
// Such numbers are small integers (e2m1 are, doubled), and here tokens are, too: of 128 neighbours each is a multiple
// of one power of two, at most 2^-21 of the largest, in three digits of base 256. An instruction multiplies 64 numbers
// by as many digits and adds them up exactly; what is rounded is the sum of 8 columns. vdpbf16ps, to which both are
// exact as well, takes more than twice as long on a Sapphire Rapids.
#pragma once
#include "codes.h"
#include "scaled_rows.h"
#if defined(CPU_CAPABILITY_AVX512)

namespace moe_metal {

// Integers with offsets, or e2m1.
template <bool kE2m1s>
class IntegerDots {
 public:
  static bool available() { return vnni_available(); }

  // False where a token has a number that is not finite, or none at all, and nothing was done.
  bool operator()(const ScaledRows& rows, const Tokens& tokens) {
    if (rows.columns == 0) return false;
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const int64_t bytes = chunks * sizeof(Chunk) + rows.groups * sizeof(float);
    const char* forms[kFewTokens];
    forms_.look_up(tokens, bytes, forms, [&](const float* x, char* form) { lay_out(x, rows, form); });
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (std::isnan(chunks_of(forms[n])->unit)) return false;
    }
    for (int64_t n = 0; n < tokens.count; n += 4) {
      constexpr decltype(&IntegerDots::all_rows<1>) kWays[] = {&IntegerDots::all_rows<1>, &IntegerDots::all_rows<2>,
                                                               &IntegerDots::all_rows<3>, &IntegerDots::all_rows<4>};
      (this->*kWays[std::min<int64_t>(4, tokens.count - n) - 1])(rows, forms + n, tokens.out + n);
    }
    return true;
  }

 private:
  static constexpr int kMiddle = kE2m1s ? 12 : 8;        // of the numbers, from 0 on
  static constexpr float kUnit = kE2m1s ? 0.5f : 1;      // of the numbers
  static constexpr int64_t kColumns = 128, kDigits = 3;  // of a chunk, 64 bytes of a row
  static constexpr int kBits = 22;                       // of a token's numbers

  // 128 of a token's numbers, which are `unit` times what the digits say, the first being the highest. A lane has
  // eight neighbours: the even ones, then the odd ones.
  struct alignas(64) Chunk {
    int8_t digits[kDigits][2][64];
    int32_t begin[kDigits][16];  // of the lanes' sums, so that the middle counts as 0
    float unit;                  // of the first chunk: NaN where a number of the token is not finite
  };
  static const Chunk* chunks_of(const char* form) { return reinterpret_cast<const Chunk*>(form); }

  // The chunks, and the groups' sums.
  [[MOE_METAL_VNNI]] static void lay_out(const float* x, const ScaledRows& rows, char* form) {
    auto* chunks = reinterpret_cast<Chunk*>(form);
    const int64_t count = at::divup(rows.columns, kColumns);
    bool finite = true;
    for (int64_t c = 0; c < count; ++c) {
      finite &= lay_out(x + c * kColumns, std::min(kColumns, rows.columns - c * kColumns), chunks[c]);
    }
    if (!finite) chunks->unit = NAN;
    auto* sums = reinterpret_cast<float*>(chunks + count);
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; !kE2m1s && g < rows.groups; ++g) {
      Vec all(0);
      for (int64_t i = 0; i < group; i += kLanes) all = all + Vec::loadu(x + g * group + i);
      sums[g] = sum(all);
    }
  }

  [[MOE_METAL_VNNI]] static bool lay_out(const float* x, int64_t count, Chunk& chunk) {
    __m512 all[8], most = _mm512_setzero_ps();
    __mmask16 finite = 0xffff;
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t left = std::clamp<int64_t>(count - 16 * i, 0, 16);
      all[i] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), x + 16 * i);
      const __m512 magnitude = _mm512_abs_ps(all[i]);
      finite &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
      most = _mm512_max_ps(most, magnitude);
    }
    if (finite != 0xffff) return false;
    // The largest is less than 2^kBits. What is smaller than any weight makes use of may become 0.
    const int above = std::max(std::ilogb(std::max(_mm512_reduce_max_ps(most), std::ldexp(1.0f, -100))), -100) + 1;
    chunk.unit = std::ldexp(kUnit, above - kBits);
    const __m512 units = _mm512_set1_ps(std::ldexp(1.0f, kBits - above));
    // Bytes from -128 to 127 that carry: half of the base is added to each, and taken off without a carry.
    const __m512i half = _mm512_set1_epi32(0x808080);
    __m512i numbers[8];
    for (int64_t i = 0; i < 8; ++i) {
      const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(all[i], units));
      numbers[i] = _mm512_xor_si512(_mm512_add_epi32(number, half), half);
    }
    for (int64_t d = 0; d < kDigits; ++d) {
      alignas(64) int8_t bytes[kColumns];
      for (int64_t i = 0; i < 8; ++i) {
        const __m512i digit = _mm512_srli_epi32(numbers[i], static_cast<unsigned>(8 * (kDigits - 1 - d)));
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes + 16 * i), _mm512_cvtepi32_epi8(digit));
      }
      __m512i begin = _mm512_setzero_si512();
      for (unsigned odd = 0; odd < 2; ++odd) {
        const auto some = [&](int64_t from) {
          return _mm512_cvtepi16_epi8(_mm512_srli_epi16(_mm512_load_si512(bytes + from), 8 * odd));
        };
        const __m512i digits = _mm512_inserti64x4(_mm512_castsi256_si512(some(0)), some(64), 1);
        _mm512_store_si512(chunk.digits[d][odd], digits);
        begin = _mm512_dpbusd_epi32(begin, _mm512_set1_epi8(kMiddle), digits);
      }
      _mm512_store_si512(chunk.begin[d], _mm512_sub_epi32(_mm512_setzero_si512(), begin));
    }
    return true;
  }

  template <int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    constexpr int R = N > 2 ? 2 : 4;
    int64_t row = 0;
    for (; row + R <= rows.rows; row += R) some_rows<R, N>(rows, row, forms, out);
    for (; row < rows.rows; ++row) some_rows<1, N>(rows, row, forms, out);
  }

  template <int R, int N>
  [[MOE_METAL_VNNI]] void some_rows(const ScaledRows& rows, int64_t first, const char* const* forms,
                                    float* const* out) const {
    const int64_t chunks = at::divup(rows.columns, kColumns), groups = std::max<int64_t>(kColumns >> rows.shift, 1);
    const uint8_t *data = rows.data + first * rows.row, *ahead = rows.ahead(first + R + rows.later(R));
    const float *scales = rows.scales + first * rows.groups, *offsets = rows.offsets + first * rows.groups;
    const Chunk* x[N];
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) x[n] = chunks_of(forms[n]);
    // Lane i's numbers are neighbours, and it has the scale of their group.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i group_of_lane =
        _mm512_srli_epi32(lane, static_cast<unsigned>(std::countr_zero(uint64_t(16 / groups))));
    const int64_t row_bytes = rows.columns / 2;
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t at = c * (kColumns / 2), group = c * kColumns >> rows.shift;
      const __mmask64 bytes_left = row_bytes - at >= 64 ? ~0ull : (1ull << (row_bytes - at)) - 1;
      const auto groups_left = static_cast<__mmask16>((1u << std::min(groups, rows.groups - group)) - 1);
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        __builtin_prefetch(ahead + R * at + r * kLine);  // in memory's order: a sixth faster on a Sapphire Rapids
        const __m512i bytes = _mm512_maskz_loadu_epi8(bytes_left, data + r * rows.row + at);
        const __m512i even = numbers(bytes), odd = numbers(_mm512_srli_epi16(bytes, 4));
        const __m512 scale =
            _mm512_permutexvar_ps(group_of_lane, _mm512_maskz_loadu_ps(groups_left, scales + r * rows.groups + group));
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          const __m512 part = _mm512_mul_ps(product(even, odd, x[n][c]), _mm512_set1_ps(x[n][c].unit));
          sums[r][n] = _mm512_fmadd_ps(part, scale, sums[r][n]);
        }
      }
    }
    if constexpr (!kE2m1s) {  // what the offsets add is a product of its own, with groups side by side
      for_each_vector(rows.groups, [&](int64_t g, auto count) {
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          const Vec scale = load(scales + r * rows.groups + g, count),
                    offset = load(offsets + r * rows.groups + g, count);
          const Vec of_middle = at::vec::fmadd(scale, Vec(kMiddle), offset);
          MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
            const Vec of_x = load(reinterpret_cast<const float*>(x[n] + chunks) + g, count);
            sums[r][n] = at::vec::fmadd(of_middle, of_x, Vec(sums[r][n]));
          }
        }
      });
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) out[n][first + r] = sum(Vec(sums[r][n]));
    }
  }

  // The low halves of bytes as numbers from 0 on.
  [[gnu::always_inline]] static inline __m512i numbers(__m512i bytes) {
    const __m512i codes = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
    if constexpr (!kE2m1s) return codes;
    alignas(16) static constexpr auto kNumbers = [] {
      std::array<uint8_t, 16> all{};
      for (int i = 0; i < 16; ++i) all[i] = static_cast<uint8_t>(kE2m1[i] / kUnit + kMiddle);
      return all;
    }();
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kNumbers.data()));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  }

  // Each lane's eight products, in units.
  [[MOE_METAL_VNNI, gnu::always_inline]] static inline __m512 product(__m512i even, __m512i odd, const Chunk& x) {
    __m512i of_digits[kDigits];
    MOE_METAL_UNROLL for (int d = 0; d < kDigits; ++d) {
      const __m512i some = _mm512_dpbusd_epi32(_mm512_load_si512(x.begin[d]), even, _mm512_load_si512(x.digits[d][0]));
      of_digits[d] = _mm512_dpbusd_epi32(some, odd, _mm512_load_si512(x.digits[d][1]));
    }
    const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(of_digits[0], 8), of_digits[1]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(of_digits[2]));
  }

  TokenForms forms_;
};

}  // namespace moe_metal
#else
namespace moe_metal {
template <bool>
using IntegerDots = NoDots;
}
#endif
