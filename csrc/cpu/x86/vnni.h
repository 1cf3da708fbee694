// Products of weights of up to 8 bits with few tokens, on processors with AVX512-VNNI.
//
// Both are integers. An instruction multiplies 64 weights by 64 digits and adds them up exactly; only sums of 8 columns
// are rounded. These columns share a unit, so two digits are enough for most tokens, and the third is multiplied only
// in chunks that need it. vdpbf16ps, which would also be exact, takes more than twice as long on a Sapphire Rapids.
#pragma once
#include "cpu/x86/integers.h"
#include "cpu/x86/plan.h"

namespace moe_metal {

template <class Numbers>
class IntegerDots {
 public:
  static constexpr bool kReadsScales = Numbers::kScalesOfLanes;  // from the blocks, so ScaledRows need not have them
  static constexpr bool kReadsOffsets = kReadsScales && Numbers::kOffset;
  static bool available() { return integers_available<Numbers>(); }
  // With AMX more tokens are multiplied, since there are no IntegerPanels then.
  static bool takes(const ScaledRows& rows, int64_t tokens) {
    return takes(rows, tokens, amx_available() ? kTokensByRows : kFewTokens);
  }
  // The result of a token without digits is NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const int64_t bytes = at::divup(2 * chunks * sizeof(Chunk) + sums_of(rows) * sizeof(float), kLine) * kLine;
    const auto forms = forms_.look_up_each<kTokensByRows>(
        tokens, bytes, [&](const float* x, char* form) { return lay_out(x, rows, form); });
    for (int64_t n = 0; n < tokens.count; n += 4) {
      constexpr decltype(&IntegerDots::all_rows<1>) kWays[] = {&IntegerDots::all_rows<1>, &IntegerDots::all_rows<2>,
                                                               &IntegerDots::all_rows<3>, &IntegerDots::all_rows<4>};
      (this->*kWays[std::min<int64_t>(4, tokens.count - n) - 1])(rows, &forms[n], tokens.out + n);
    }
  }

 protected:
  // Used by BFloat16Dots as well.
  static bool takes(const ScaledRows& rows, int64_t tokens, int64_t most) {
    return integers_available<Numbers>() && tokens <= most && rows.columns > 0;
  }
  static constexpr int64_t kColumns = Digits::kColumns;  // of a chunk
  static constexpr int64_t kBytes = kColumns * Numbers::kBytes / Numbers::kColumns;

  static int64_t sums_of(const ScaledRows& rows) { return (kReadsOffsets ? 2 : 1) * rows.groups; }
  // The numbers of a lane are in one group, whose scale the lane gets.
  alignas(64) static constexpr auto kFirstOfLane = [] {
    std::array<int32_t, 16> columns{};
    for (int i = 0; i < 16; ++i) columns[i] = Numbers::kOrder[4 * i];
    return columns;
  }();
  static __m512i groups_of_lanes(const ScaledRows& rows) {
    return _mm512_srl_epi32(_mm512_load_si512(kFirstOfLane.data()), _mm_cvtsi32_si128(rows.shift));
  }

  static_assert(kAffineGroups.back() <= kColumns, "so that a chunk has at least one group");
  static int64_t groups_of_chunk(const ScaledRows& rows) { return kColumns >> rows.shift; }
  static __mmask16 mask_of_groups(const ScaledRows& rows) {
    return static_cast<__mmask16>((1u << groups_of_chunk(rows)) - 1);
  }

 private:
  static constexpr int64_t kDigits = Digits::kCount;

  // The lanes in which numbers are times 16.
  static constexpr __mmask16 kTimes16 = requires { &Numbers::unpack_in_place; } ? 0xaaaa : 0;
  static_assert(kTimes16 == 0 || Numbers::kOffset, "so that no middle is subtracted");
  [[gnu::always_inline]] static inline void unpack(const uint8_t* row, int64_t chunk, int64_t columns,
                                                   __m512i (&to)[2]) {
    if constexpr (kTimes16 != 0)
      Numbers::unpack_in_place(row, chunk, columns, to);
    else
      Numbers::unpack(row, chunk, columns, to);
  }

  // Columns are in the order Numbers::kOrder.
  struct alignas(64) Chunk {
    int8_t digits[kDigits][2][64];
    // Initial values of the lanes' sums, which subtract the middle: for the first two digits, and for the third.
    int32_t begin[2][16];
    float units[16];  // of the lanes; in the first chunk: NaN if the token has no digits
    bool two;         // without the third digit
    int32_t index;    // the index of its chunk in the row
    int32_t rests;    // in the first chunk: how many chunks of rests follow
  };
  static const Chunk* chunks_of(const char* form) { return reinterpret_cast<const Chunk*>(form); }

  // Writes the chunks, then chunks of rests, for which there is as much room, then the sums of groups.
  // -> the number of bytes used
  [[MOE_METAL_VNNI]] static int64_t lay_out(const float* x, const ScaledRows& rows, char* form) {
    auto* chunks = reinterpret_cast<Chunk*>(form);
    const int64_t count = at::divup(rows.columns, kColumns);
    Chunk *rest = chunks + count, *end = rest + count;
    bool finite = true;
    for (int64_t c = 0; c < count; ++c) {
      Digits all;
      alignas(64) float last[kColumns], ordered[kColumns];
      const float* from = x + c * kColumns;
      if (const int64_t left = rows.columns - c * kColumns; left < kColumns) {
        std::fill(std::copy_n(from, left, last), last + kColumns, 0.0f);
        from = last;
      }
      put_in_order<Numbers::kOrder>(from, ordered);
      finite &= all.set(ordered, kColumns, true);
      lay_out(all, c, chunks[c]);
      while (!all.whole && finite) {
        finite = rest < end && all.set(all.rest, kColumns, true);
        if (finite) lay_out(all, c, *rest++);
      }
    }
    chunks->rests = static_cast<int32_t>(rest - chunks - count);
    if (!finite) std::fill_n(chunks->units, 16, NAN);
    auto* sums = reinterpret_cast<float*>(end);
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; Numbers::kOffset && g < rows.groups; ++g) {
      const float sum = sum_of(x + g * group, group);
      if constexpr (kReadsOffsets)
        sums[2 * g] = 0, sums[2 * g + 1] = -sum;  // for Numbers::factors()
      else
        sums[g] = sum;
    }
    return (rest - chunks) * sizeof(Chunk) + sums_of(rows) * sizeof(float);
  }

  [[MOE_METAL_VNNI]] static void lay_out(const Digits& all, int64_t index, Chunk& chunk) {
    chunk.index = static_cast<int32_t>(index);
    chunk.two = all.two;
    const float unit = Numbers::kUnit * (all.two ? 256 : 1);
    const __m512 units = _mm512_mul_ps(_mm512_load_ps(all.units), _mm512_set1_ps(unit));
    _mm512_store_ps(chunk.units, _mm512_mask_mul_ps(units, kTimes16, units, _mm512_set1_ps(1.0f / 16)));
    __m512i of_middle[kDigits];
    for (int64_t d = 0; d < kDigits; ++d) {
      of_middle[d] = _mm512_setzero_si512();
      for (int half = 0; half < 2; ++half) {
        const __m512i digits = _mm512_load_si512(all.digits[d] + 64 * half);
        _mm512_store_si512(chunk.digits[d][half], digits);
        of_middle[d] = _mm512_dpbusd_epi32(of_middle[d], _mm512_set1_epi8(static_cast<char>(Numbers::kMiddle)), digits);
      }
    }
    const __m512i of_two = _mm512_add_epi32(_mm512_slli_epi32(of_middle[0], 8), of_middle[1]);
    _mm512_store_si512(chunk.begin[0], _mm512_sub_epi32(_mm512_setzero_si512(), of_two));
    _mm512_store_si512(chunk.begin[1], _mm512_sub_epi32(_mm512_setzero_si512(), of_middle[2]));
  }

  template <int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    rows.for_blocks<4>(
        [&](auto R, int64_t first, const uint8_t* ahead) { multiply_block<R, N>(rows, first, ahead, forms, out); });
  }

  template <int R, int N>
  [[MOE_METAL_VNNI]] void multiply_block(const ScaledRows& rows, int64_t first, const uint8_t* ahead,
                                         const char* const* forms, float* const* out) const {
    constexpr int P = std::max<int>(1, Numbers::kColumns / kColumns);  // chunks of a block
    const int64_t whole = rows.columns / kColumns;
    const uint8_t* data = rows.data + first * rows.row;
    const float* scales = rows.scales + first * rows.groups;
    const __m512i group_of_lane = groups_of_lanes(rows);
    const int64_t groups = groups_of_chunk(rows);
    const __mmask16 mask = mask_of_groups(rows);
    const Chunk* x[N];
    __m512 sums[R][N];
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      x[n] = chunks_of(forms[n]);
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) sums[r][n] = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < whole; c += P, data += P * kBytes, ahead += R * P * kBytes, scales += P * groups) {
      MOE_METAL_UNROLL for (int p = 0; p < P; ++p) {
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          // Prefetching in address order is a sixth faster on a Sapphire Rapids.
          prefetch_lines(ahead, (p * R + r) * kBytes, kBytes);
          if constexpr (kReadsOffsets) {
            if (p == 0) {
              const __m512 offsets = Numbers::factors(data + r * rows.row);
              MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
                sums[r][n] = _mm512_fmadd_ps(offsets, _mm512_loadu_ps(sums_of_x(rows, x[n]) + c / P * 16), sums[r][n]);
              }
            }
          }
          __m512i numbers[2];
          unpack(data + r * rows.row, p, P * kColumns, numbers);
          const __m512 scale = [&]() __attribute__((always_inline)) {
            if constexpr (kReadsScales) return Numbers::scales_of_lanes(data + r * rows.row, p, P * kColumns);
            return _mm512_permutexvar_ps(group_of_lane,
                                         _mm512_maskz_loadu_ps(mask, scales + r * rows.groups + p * groups));
          }();
          MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
            sums[r][n] = _mm512_fmadd_ps(product(numbers, x[n][c + p]), scale, sums[r][n]);
          }
        }
      }
    }
    finish(rows, first, x, sums, out);
  }
  template <int R, int N>
  [[gnu::always_inline]] static inline void finish(const ScaledRows& rows, int64_t first, const Chunk* const (&x)[N],
                                                   __m512 (&sums)[R][N], float* const* out) {
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      if (rows.columns % kColumns > 0 || x[n]->rests > 0) {
        const auto more = others<R>(rows, first, x[n]);
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) sums[r][n] = _mm512_add_ps(sums[r][n], more[r]);
      }
      __m512 of_token[R];
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        of_token[r] = sums[r][n];
        if constexpr (Numbers::kOffset && !kReadsOffsets) of_token[r] = add_offsets(rows, first + r, x[n], of_token[r]);
      }
      store_sums(of_token, out[n] + first);
    }
  }

  // The products with an incomplete last chunk, and with the rests.
  template <int R>
  [[MOE_METAL_VNNI, gnu::noinline]] static std::array<Vec, R> others(const ScaledRows& rows, int64_t first,
                                                                     const Chunk* x) {
    const int64_t whole = rows.columns / kColumns, chunks = at::divup(rows.columns, kColumns);
    const __m512i group_of_lane = groups_of_lanes(rows);
    std::array<Vec, R> sums;
    sums.fill(Vec(0));
    for (int64_t i = whole; i < chunks + x->rests; ++i) {
      const int64_t c = x[i].index, group = c * kColumns >> rows.shift;
      const int64_t groups = std::min(groups_of_chunk(rows), rows.groups - group);
      for (int r = 0; r < R; ++r) {
        const uint8_t* data = rows.data + (first + r) * rows.row;
        __m512i numbers[2];
        unpack(data, c, rows.columns, numbers);
        __m512 scale;
        if constexpr (kReadsScales) {
          scale = Numbers::scales_of_lanes(data, c, rows.columns);
        } else {
          const float* from = rows.scales + (first + r) * rows.groups + group;
          const auto left = static_cast<__mmask16>((1u << groups) - 1);
          scale = _mm512_permutexvar_ps(group_of_lane, _mm512_maskz_loadu_ps(left, from));
        }
        sums[r] = _mm512_fmadd_ps(product(numbers, x[i]), scale, sums[r]);
      }
    }
    return sums;
  }
  // Stores the sum of the lanes of each vector.
  template <size_t R>
  static void store_sums(const __m512 (&of)[R], float* to) {
    if constexpr (R == 4) {
      _mm_storeu_ps(to, sums_of_lanes(of[0], of[1], of[2], of[3]));
    } else {
      for (size_t r = 0; r < R; ++r) to[r] = sum(Vec(of[r]));
    }
  }
  static const float* sums_of_x(const ScaledRows& rows, const Chunk* x) {
    return reinterpret_cast<const float*>(x + 2 * at::divup(rows.columns, kColumns));
  }
  // Adds the offsets times the sums of x, with vectors along the groups.
  [[gnu::always_inline]] static inline __m512 add_offsets(const ScaledRows& rows, int64_t row, const Chunk* x,
                                                          __m512 sums) {
    const float* offsets = rows.offsets + row * rows.groups;
    const float* of_x = sums_of_x(rows, x);
    int64_t g = 0;
    for (; g + 16 <= rows.groups; g += 16) {
      sums = _mm512_fmadd_ps(_mm512_loadu_ps(offsets + g), _mm512_loadu_ps(of_x + g), sums);
    }
    const auto left = static_cast<__mmask16>((1u << (rows.groups - g)) - 1);
    return _mm512_fmadd_ps(_mm512_maskz_loadu_ps(left, offsets + g), _mm512_maskz_loadu_ps(left, of_x + g), sums);
  }

  // The sum of each lane's products. Codes of formats with offsets are not centred, so they need no initial value.
  [[MOE_METAL_VNNI, gnu::always_inline]] static inline __m512 product(const __m512i (&numbers)[2], const Chunk& x) {
    const __m512i none = _mm512_setzero_si512(), high = _mm512_slli_epi32(add(none, numbers, x.digits[0]), 8);
    const __m512i of_two = Numbers::kOffset
                               ? add(high, numbers, x.digits[1])
                               : _mm512_add_epi32(high, add(_mm512_load_si512(x.begin[0]), numbers, x.digits[1]));
    __m512 sums = _mm512_cvtepi32_ps(of_two);
    if (!x.two) {
      const __m512i begin = Numbers::kOffset ? none : _mm512_load_si512(x.begin[1]);
      sums = _mm512_fmadd_ps(sums, _mm512_set1_ps(256), _mm512_cvtepi32_ps(add(begin, numbers, x.digits[2])));
    }
    return _mm512_mul_ps(sums, _mm512_load_ps(x.units));
  }
  [[MOE_METAL_VNNI, gnu::always_inline]] static inline __m512i add(__m512i sums, const __m512i (&numbers)[2],
                                                                   const int8_t (&digits)[2][64]) {
    const __m512i first = _mm512_dpbusd_epi32(sums, numbers[0], _mm512_load_si512(digits[0]));
    return _mm512_dpbusd_epi32(first, numbers[1], _mm512_load_si512(digits[1]));
  }

  PreparedTokenCache forms_;
};

}  // namespace moe_metal
