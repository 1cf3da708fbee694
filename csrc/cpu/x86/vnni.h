// Products of numbers of up to 8 bits with few tokens, on processors with AVX512-VNNI.
//
// Both are integers here. An instruction multiplies 64 numbers by as many digits and adds them up exactly; what is
// rounded is the sum of 8 columns. vdpbf16ps, to which both are exact as well, takes more than twice as long on a
// Sapphire Rapids.
#pragma once
#include "cpu/plan.h"
#include "cpu/x86/integers.h"

namespace moe_metal {

template <class Numbers>
class IntegerDots {
 public:
  static constexpr int64_t kRowsAtOnce = 1;
  static bool takes(const ScaledRows& rows, int64_t tokens) {
    return vnni_available() && tokens <= kFewTokens && rows.columns > 0;
  }
  // A token that has no digits comes to NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const int64_t bytes = at::divup(2 * chunks * sizeof(Chunk) + rows.groups * sizeof(float), kLine) * kLine;
    const char* form = forms_.look_up(tokens.x, tokens.count, tokens.count * bytes, [&](char* to) {
      int64_t filled = 0;
      for (int64_t n = 0; n < tokens.count; ++n) filled += lay_out(tokens.x[n], rows, to + n * bytes);
      return filled;
    });
    const char* forms[kFewTokens];
    for (int64_t n = 0; n < tokens.count; ++n) forms[n] = form + n * bytes;
    for (int64_t n = 0; n < tokens.count; n += 4) {
      constexpr decltype(&IntegerDots::all_rows<1>) kWays[] = {&IntegerDots::all_rows<1>, &IntegerDots::all_rows<2>,
                                                               &IntegerDots::all_rows<3>, &IntegerDots::all_rows<4>};
      (this->*kWays[std::min<int64_t>(4, tokens.count - n) - 1])(rows, forms + n, tokens.out + n);
    }
  }

 private:
  static constexpr int64_t kColumns = Digits::kColumns, kDigits = Digits::kCount;  // of a chunk
  static constexpr int64_t kBytes = kColumns * Numbers::kBytes / Numbers::kColumns;

  // The columns in the numbers' order.
  struct alignas(64) Chunk {
    int8_t digits[kDigits][2][64];
    int32_t begin[kDigits][16];  // of the lanes' sums, so that the middle counts as 0
    float unit;                  // of the first chunk: NaN where the token has no digits
    int32_t place;               // among the row's chunks
    int32_t rests;               // of the first chunk: how many there are
  };
  static const Chunk* chunks_of(const char* form) { return reinterpret_cast<const Chunk*>(form); }

  // The chunks, then the groups' sums, and the chunks' rests, for as many of which there is room. -> the bytes filled
  [[MOE_METAL_VNNI]] static int64_t lay_out(const float* x, const ScaledRows& rows, char* form) {
    auto* chunks = reinterpret_cast<Chunk*>(form);
    const int64_t count = at::divup(rows.columns, kColumns);
    Chunk *rest = chunks + count, *end = rest + count;
    bool finite = true;
    for (int64_t c = 0; c < count; ++c) {
      Digits all;
      alignas(64) float ordered[kColumns];
      const int64_t left = rows.columns - c * kColumns;
      for (int64_t i = 0; i < kColumns; ++i) {
        ordered[i] = Numbers::kOrder[i] < left ? x[c * kColumns + Numbers::kOrder[i]] : 0;
      }
      finite &= all.set(ordered, kColumns);
      lay_out(all, c, chunks[c]);
      while (!all.whole && finite) {
        finite = rest < end && all.set(all.rest, kColumns);
        if (finite) lay_out(all, c, *rest++);
      }
    }
    chunks->rests = static_cast<int32_t>(rest - chunks - count);
    if (!finite) chunks->unit = NAN;
    auto* sums = reinterpret_cast<float*>(end);
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; Numbers::kOffset && g < rows.groups; ++g) sums[g] = sum_of(x + g * group, group);
    return (rest - chunks) * sizeof(Chunk) + rows.groups * sizeof(float);
  }

  [[MOE_METAL_VNNI]] static void lay_out(const Digits& all, int64_t place, Chunk& chunk) {
    chunk.place = static_cast<int32_t>(place);
    chunk.unit = all.unit * Numbers::kUnit;
    for (int64_t d = 0; d < kDigits; ++d) {
      __m512i begin = _mm512_setzero_si512();
      for (int half = 0; half < 2; ++half) {
        const __m512i digits = _mm512_load_si512(all.digits[d] + 64 * half);
        _mm512_store_si512(chunk.digits[d][half], digits);
        begin = _mm512_dpbusd_epi32(begin, _mm512_set1_epi8(static_cast<char>(Numbers::kMiddle)), digits);
      }
      _mm512_store_si512(chunk.begin[d], _mm512_sub_epi32(_mm512_setzero_si512(), begin));
    }
  }

  template <int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    constexpr int R = N > 2 ? 2 : 4;
    const int64_t later = R + rows.later(R);
    int64_t row = 0;
    for (; row + R <= rows.rows; row += R) some_rows<R, N>(rows, row, rows.ahead(row + later), forms, out);
    for (; row < rows.rows; ++row) some_rows<1, N>(rows, row, rows.ahead(row + later), forms, out);
  }

  template <int R, int N>
  [[MOE_METAL_VNNI]] void some_rows(const ScaledRows& rows, int64_t first, const uint8_t* ahead,
                                    const char* const* forms, float* const* out) const {
    const int64_t chunks = at::divup(rows.columns, kColumns), groups = std::max<int64_t>(kColumns >> rows.shift, 1);
    const uint8_t* data = rows.data + first * rows.row;
    const float *scales = rows.scales + first * rows.groups, *offsets = rows.offsets + first * rows.groups;
    const Chunk* x[N];
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) x[n] = chunks_of(forms[n]);
    // A lane's numbers are of one group, and it has the group's scale.
    alignas(64) static constexpr auto kFirstOfLane = [] {
      std::array<int32_t, 16> columns{};
      for (int i = 0; i < 16; ++i) columns[i] = Numbers::kOrder[4 * i];
      return columns;
    }();
    const __m512i group_of_lane =
        _mm512_srl_epi32(_mm512_load_si512(kFirstOfLane.data()), _mm_cvtsi32_si128(rows.shift));
    // A row's numbers in a chunk's columns. -> their scales
    const auto unpack = [&](int64_t c, int r, __m512i(&numbers)[2]) __attribute__((always_inline)) {
      const int64_t group = c * kColumns >> rows.shift;
      const auto groups_left = static_cast<__mmask16>((1u << std::min(groups, rows.groups - group)) - 1);
      Numbers::unpack(data + r * rows.row, c, rows.columns, numbers);
      return _mm512_permutexvar_ps(group_of_lane, _mm512_maskz_loadu_ps(groups_left, scales + r * rows.groups + group));
    };
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < chunks; ++c) {
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        // In memory's order: a sixth faster on a Sapphire Rapids.
        for (int64_t line = 0; line < kBytes; line += kLine)
          __builtin_prefetch(ahead + (R * c + r) * kBytes + line, 0, 2);
        __m512i numbers[2];
        const __m512 scale = unpack(c, r, numbers);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          const __m512 part = _mm512_mul_ps(product(numbers, x[n][c]), _mm512_set1_ps(x[n][c].unit));
          sums[r][n] = _mm512_fmadd_ps(part, scale, sums[r][n]);
        }
      }
    }
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      for (const Chunk *rest = x[n] + chunks, *end = rest + x[n]->rests; rest < end; ++rest) {
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          __m512i numbers[2];
          const __m512 scale = unpack(rest->place, r, numbers);
          const __m512 part = _mm512_mul_ps(product(numbers, *rest), _mm512_set1_ps(rest->unit));
          sums[r][n] = _mm512_fmadd_ps(part, scale, sums[r][n]);
        }
      }
    }
    if constexpr (Numbers::kOffset) {  // what the offsets add is a product of its own, with groups side by side
      for_each_vector(rows.groups, [&](int64_t g, auto count) {
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          const Vec scale = load(scales + r * rows.groups + g, count),
                    offset = load(offsets + r * rows.groups + g, count);
          const Vec of_middle = at::vec::fmadd(scale, Vec(Numbers::kMiddle), offset);
          MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
            const Vec of_x = load(reinterpret_cast<const float*>(x[n] + 2 * chunks) + g, count);
            sums[r][n] = at::vec::fmadd(of_middle, of_x, Vec(sums[r][n]));
          }
        }
      });
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) out[n][first + r] = sum(Vec(sums[r][n]));
    }
  }

  // The sums of each lane's products, in units.
  [[MOE_METAL_VNNI, gnu::always_inline]] static inline __m512 product(const __m512i (&numbers)[2], const Chunk& x) {
    __m512i of_digits[kDigits];
    MOE_METAL_UNROLL for (int d = 0; d < kDigits; ++d) {
      const __m512i even =
          _mm512_dpbusd_epi32(_mm512_load_si512(x.begin[d]), numbers[0], _mm512_load_si512(x.digits[d][0]));
      of_digits[d] = _mm512_dpbusd_epi32(even, numbers[1], _mm512_load_si512(x.digits[d][1]));
    }
    const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(of_digits[0], 8), of_digits[1]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(of_digits[2]));
  }

  TokenForms forms_;
};

}  // namespace moe_metal
