// Products of weights of up to 5 bits with few bfloat16 tokens, on processors that multiply bfloat16 as fast as bytes.
//
// bfloat16 represents the codes of the weights exactly, and a table lookup converts 32 of them. Tokens need no digits,
// so this takes fewer instructions than IntegerDots, whose readers, scales and order of columns it uses. Sums are
// float: the sum of 8 columns is scaled and added up.
#pragma once
#include "cpu/x86/e4m3_dots.h"
#include "cpu/x86/vnni.h"

namespace moe_metal {

template <class Numbers>
class BFloat16Dots : public IntegerDots<Numbers> {
  using Base = IntegerDots<Numbers>;

 public:
  using Base::kReadsScales;
  static constexpr bool kExists = Numbers::kMiddle <= 16;  // so numbers are below 32, the size of the table
  static bool takes(const ScaledRows& rows, int64_t tokens) {
    return bfloat16_is_fast() ? Base::takes(rows, tokens, kTokensByRows) : Base::takes(rows, tokens);
  }
  // The result of a token with tiny numbers is NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    // One token: 4096 x 2048 in 4 bits takes 131 us, and 116 as integers, which take fewer lookups.
    if (!bfloat16_is_fast() || tokens.count == 1) return Base::operator()(rows, tokens);
    const int64_t bytes = at::divup(sums_at(rows) + sums_of(rows) * sizeof(float), kLine) * kLine;
    const auto forms = forms_.look_up_each<kTokensByRows>(tokens, bytes, [&](const float* x, char* form) {
      lay_out(x, rows, form);
      return bytes;
    });
    for (int64_t n = 0, some; n < tokens.count; n += some) {
      constexpr decltype(&BFloat16Dots::all_rows<4, 2>) kWays[] = {
          &BFloat16Dots::all_rows<4, 2>, &BFloat16Dots::all_rows<4, 3>, &BFloat16Dots::all_rows<2, 4>,
          &BFloat16Dots::all_rows<2, 5>, &BFloat16Dots::all_rows<2, 6>};
      some = even_part(tokens.count - n, 6);
      (this->*kWays[some - 2])(rows, &forms[n], tokens.out + n);
    }
  }

 private:
  using Base::kBytes, Base::kColumns, Base::kReadsOffsets, Base::sums_of;
  static constexpr int P = std::max<int>(1, Numbers::kColumns / kColumns);  // chunks of a block

  // The values of numbers. The sum of small ones has smaller rounding errors, so the middle is subtracted.
  alignas(64) static constexpr auto kValues = [] {
    std::array<uint16_t, 32> values{};
    for (int i = 0; i < 32; ++i) {
      const float value = Numbers::kUnit * static_cast<float>(i - Numbers::kMiddle);
      values[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
    return values;
  }();
  // The columns of a chunk in four vectors: those of the even and of the odd bytes of each half of the numbers.
  static constexpr auto kOrder = [] {
    std::array<uint8_t, kColumns> columns{};
    for (int i = 0; i < kColumns; ++i) columns[i] = Numbers::kOrder[i / 64 * 64 + i % 32 * 2 + i / 32 % 2];
    return columns;
  }();
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i values(const __m512i (&numbers)[2], int v) {
    const __m512i bytes = v % 2 ? _mm512_srli_epi16(numbers[v / 2], 8) : numbers[v / 2];
    return _mm512_permutexvar_epi16(bytes, _mm512_load_si512(kValues.data()));  // uses the lower 5 bits of words
  }

  // A token's form: its chunks as bfloat16, then the sums of its groups.
  static int64_t sums_at(const ScaledRows& rows) {
    return at::divup(rows.columns, kColumns) * kColumns * sizeof(at::BFloat16);
  }
  static const at::BFloat16* chunk_of(const char* form, int64_t c) {
    return reinterpret_cast<const at::BFloat16*>(form) + c * kColumns;
  }
  static const float* sums_of_x(const ScaledRows& rows, const char* form) {
    return reinterpret_cast<const float*>(form + sums_at(rows));
  }
  [[MOE_METAL_BF16]] static void lay_out(const float* x, const ScaledRows& rows, char* form) {
    auto* to = reinterpret_cast<at::BFloat16*>(form);
    auto* sums = reinterpret_cast<float*>(form + sums_at(rows));
    __mmask16 tiny = 0;
    for (int64_t c = 0; c < rows.columns; c += kColumns) {
      alignas(64) float some[kColumns], ordered[kColumns];
      const int64_t count = std::min(rows.columns - c, kColumns);
      for (int64_t i = 0; i < kColumns; ++i) some[i] = i < count ? x[c + i] : 0;
      for (int64_t i = 0; i < kColumns; i += kLanes) tiny |= tiny_numbers(_mm512_load_ps(some + i));
      // The sums are of the same numbers as the products. Otherwise the error of rounding a token, which is an
      // intermediate result of `experts`, would be multiplied by what the middle subtracts, and not by the weights.
      for (float& number : some) number = static_cast<float>(at::BFloat16(number));
      for (int64_t i = 0; i < kColumns; ++i) ordered[i] = some[kOrder[i]];
      for (int64_t i = 0; i < kColumns; i += 32) _mm512_store_si512(to + c + i, bfloat16s(ordered + i, 32));
      if constexpr (Numbers::kOffset) sums = add_groups(some, count, int64_t{1} << rows.shift, sums);
    }
    if (tiny) *to = NAN;
  }
  // Writes the sum of each group. -> where the next one goes
  static float* add_groups(const float* x, int64_t count, int64_t group, float* to) {
    for (int64_t i = 0; i < count; i += group) {
      const float sum = sum_of(x + i, group);
      if constexpr (kReadsOffsets) *to++ = Numbers::kMiddle * sum;  // with the next, for Numbers::factors()
      *to++ = kReadsOffsets ? -sum : sum;
    }
    return to;
  }
  // Numbers that are not 0, but so small that the processor may round their products to 0.
  static __mmask16 tiny_numbers(__m512 x) {
    const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-100f), _CMP_LT_OQ);
    return _mm512_mask_cmp_ps_mask(small, x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  }

  template <int R, int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    rows.for_blocks<R>(
        [&](auto r, int64_t first, const uint8_t* ahead) { multiply_block<r, N>(rows, first, ahead, forms, out); });
  }

  template <int R, int N>
  [[MOE_METAL_BF16]] void multiply_block(const ScaledRows& rows, int64_t first, const uint8_t* ahead,
                                         const char* const* forms, float* const* out) const {
    constexpr int S = std::min(R, 2);  // rows at a time
    const int64_t whole = rows.columns / kColumns;
    const uint8_t* data = rows.data + first * rows.row;
    const float* scales = rows.scales + first * rows.groups;
    const int64_t groups = Base::groups_of_chunk(rows);
    const __m512i group_of_lane = Base::groups_of_lanes(rows);
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int i = 0; i < R * N; ++i) sums[i / N][i % N] = _mm512_setzero_ps();
    for (int64_t c = 0; c < whole; c += P, data += P * kBytes, ahead += R * P * kBytes, scales += P * groups) {
      MOE_METAL_UNROLL for (int i = 0; i < R * P; i += S) {
        prefetch_lines(ahead, i * kBytes, S * kBytes);  // in address order
        const int p = i / R, r = i % R;
        const float* of_rows = scales + r * rows.groups + p * groups;
        add_chunk<S, N>(rows, data + r * rows.row, of_rows, c, p, group_of_lane, forms, sums + r);
      }
    }
    finish(rows, first, forms, sums, out);
  }

  // Adds the products of a chunk of S rows.
  template <int S, int N>
  [[MOE_METAL_BF16, gnu::always_inline]] static inline void add_chunk(const ScaledRows& rows, const uint8_t* data,
                                                                      const float* scales, int64_t block, int p,
                                                                      __m512i group_of_lane, const char* const* forms,
                                                                      __m512 (*sums)[N]) {
    const int64_t c = block + p;
    __m512i numbers[S][2];
    MOE_METAL_UNROLL for (int s = 0; s < S; ++s) {
      const uint8_t* here = data + s * rows.row;
      Numbers::unpack(here, p, P * kColumns, numbers[s]);
      if constexpr (kReadsOffsets) {
        if (p > 0) continue;
        const __m512 factors = Numbers::factors(here);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          const __m512 of_x = _mm512_loadu_ps(sums_of_x(rows, forms[n]) + c / P * 16);
          sums[s][n] = _mm512_fmadd_ps(factors, of_x, sums[s][n]);
        }
      }
    }
    __m512 parts[S][N];
    MOE_METAL_UNROLL for (int i = 0; i < S * N; ++i) parts[i / N][i % N] = _mm512_setzero_ps();
    MOE_METAL_UNROLL for (int v = 0; v < 4; ++v) {
      __m512i some[S];
      MOE_METAL_UNROLL for (int s = 0; s < S; ++s) some[s] = values(numbers[s], v);
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        const __m512i x = _mm512_load_si512(chunk_of(forms[n], c) + 32 * v);
        MOE_METAL_UNROLL for (int s = 0; s < S; ++s) parts[s][n] = bfloat16_dot(parts[s][n], some[s], x);
      }
    }
    const __mmask16 mask = Base::mask_of_groups(rows);
    MOE_METAL_UNROLL for (int s = 0; s < S; ++s) {
      const __m512 scale = [&]() __attribute__((always_inline)) {
        if constexpr (kReadsScales) return Numbers::scales_of_lanes(data + s * rows.row, p, P * kColumns);
        return _mm512_permutexvar_ps(group_of_lane, _mm512_maskz_loadu_ps(mask, scales + s * rows.groups));
      }();
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[s][n] = _mm512_fmadd_ps(parts[s][n], scale, sums[s][n]);
    }
  }

  template <int R, int N>
  [[gnu::always_inline]] static inline void finish(const ScaledRows& rows, int64_t first, const char* const* forms,
                                                   __m512 (&sums)[R][N], float* const* out) {
    if (rows.columns % kColumns > 0) {
      MOE_METAL_UNROLL for (int i = 0; i < R * N; ++i) {
        const __m512 last = last_chunk(rows, first + i / N, forms[i % N]);
        sums[i / N][i % N] = _mm512_add_ps(sums[i / N][i % N], last);
      }
    }
    if constexpr (Numbers::kOffset && !kReadsOffsets) {
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) add_offsets<N>(rows, first + r, forms, sums[r]);
    }
    MOE_METAL_UNROLL for (int i = 0; i < R * N; i += 4) {
      const auto sum = [&](int k) { return k < R * N ? sums[k / N][k % N] : _mm512_setzero_ps(); };
      alignas(16) float totals[4];
      _mm_store_ps(totals, sums_of_lanes(sum(i), sum(i + 1), sum(i + 2), sum(i + 3)));
      for (int k = i; k < std::min(i + 4, R * N); ++k) out[k % N][first + k / N] = totals[k - i];
    }
  }

  // The products with an incomplete last chunk.
  [[MOE_METAL_BF16, gnu::noinline]] static __m512 last_chunk(const ScaledRows& rows, int64_t row, const char* form) {
    const int64_t c = rows.columns / kColumns, group = c * kColumns >> rows.shift;
    const uint8_t* data = rows.data + row * rows.row;
    __m512i numbers[2];
    Numbers::unpack(data, c, rows.columns, numbers);
    __m512 sum = _mm512_setzero_ps();
    for (int v = 0; v < 4; ++v) {
      sum = bfloat16_dot(sum, values(numbers, v), _mm512_load_si512(chunk_of(form, c) + 32 * v));
    }
    if constexpr (kReadsScales) return _mm512_mul_ps(sum, Numbers::scales_of_lanes(data, c, rows.columns));
    const auto left = static_cast<__mmask16>((1u << (rows.groups - group)) - 1);
    const __m512 scales = _mm512_maskz_loadu_ps(left, rows.scales + row * rows.groups + group);
    return _mm512_mul_ps(sum, _mm512_permutexvar_ps(Base::groups_of_lanes(rows), scales));
  }

  // Adds the offsets, and what the middle subtracts, times the sums of x, with vectors along the groups.
  template <int N>
  [[gnu::always_inline]] static inline void add_offsets(const ScaledRows& rows, int64_t row, const char* const* forms,
                                                        __m512 (&sums)[N]) {
    for (int64_t g = 0; g < rows.groups; g += 16) {
      const int64_t left = rows.groups - g, at = row * rows.groups + g;
      const auto some = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xffff);
      const __m512 scales = _mm512_maskz_loadu_ps(some, rows.scales + at);
      const __m512 of_middle = _mm512_fmadd_ps(scales, _mm512_set1_ps(Numbers::kUnit * Numbers::kMiddle),
                                               _mm512_maskz_loadu_ps(some, rows.offsets + at));
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        const __m512 of_x = _mm512_maskz_loadu_ps(some, sums_of_x(rows, forms[n]) + g);
        sums[n] = _mm512_fmadd_ps(of_middle, of_x, sums[n]);
      }
    }
  }

  PreparedTokenCache forms_;
};

template <class Numbers>
using FewDots = std::conditional_t<BFloat16Dots<Numbers>::kExists, BFloat16Dots<Numbers>, IntegerDots<Numbers>>;

}  // namespace moe_metal
