// Weights and tokens as integers, for processors that multiply bytes.
#pragma once
#include <algorithm>

#include "cpu/vector/bytes.h"
#include "cpu/weights/scaled_rows.h"
#include "cpu/x86/processor.h"

namespace moe_metal {

// 128 numbers of a token as multiples of a power of two (the unit), in three digits of base 256. A unit is at most
// 2^-22 of the largest number that shares it. If a weight is 0 where the token is largest, the small numbers decide.
// What three digits cannot hold of them is kept in `rest`, if it is of many numbers, and `rest` gets separate digits.
struct alignas(64) Digits {
  static constexpr int64_t kColumns = 128, kCount = 3;

  int8_t digits[kCount][kColumns];  // the most significant first
  float rest[kColumns];             // numbers minus the value of their digits
  float units[16];                  // the values of an integer of 1: see `set`
  bool two;                         // the first two digits are enough: see `set`
  bool whole;                       // every rest is 0, or two digits are enough

  // Returns false if a number is not finite or the largest is too small; then all digits are 0. Numbers from `count` on
  // are 0. x may be `rest`. All numbers share a unit or, with `by_lanes`, units[l] is for the four numbers in lane l of
  // the first half of the digits, and the four in lane l of the second half: fewer numbers per unit have more similar
  // magnitudes, so two digits are enough more often. They are enough if at most an eighth of the numbers that share a
  // unit and are not 0 lose a part that matters.
  bool set(const float* x, int64_t count, bool by_lanes = false) {
    __m512 all[8], most[4];
    __m512i bits = _mm512_setzero_si512();
    __mmask16 finite = 0xffff;
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t left = std::clamp<int64_t>(count - 16 * i, 0, 16);
      all[i] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), x + 16 * i);
      const __m512 magnitude = _mm512_abs_ps(all[i]);
      bits = _mm512_or_si512(bits, _mm512_castps_si512(all[i]));
      finite &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
      most[i % 4] = i < 4 ? magnitude : _mm512_max_ps(most[i % 4], magnitude);
    }
    clear();
    largest(most, by_lanes);
    __m512i above[4];  // the largest number is less than 2^above
    __mmask16 small = 0;
    for (int64_t i = 0; i < 4; ++i) above[i] = exponents(most[i], small);
    if (finite != 0xffff || small) return false;
    set(all, above, bits, by_lanes);
    return true;
  }
  void clear() {
    std::memset(digits, 0, sizeof(digits));
    std::fill_n(units, 16, 0.0f);
    whole = two = true;
  }

  // The least powers of two above non-negative numbers, and the next for numbers that digits of up to 127 could not
  // represent. Sets the lanes of `small` whose numbers are too small for digits.
  static __m512i exponents(__m512 x, __mmask16& small) {
    const __m512i further = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x12000));
    const __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(further, 23), _mm512_set1_epi32(127));
    const __m512i smallest = _mm512_set1_epi32(-100);
    const __mmask16 not_zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    small |= _mm512_mask_cmplt_epi32_mask(not_zero, exponent, smallest);
    return _mm512_add_epi32(_mm512_max_epi32(exponent, smallest), _mm512_set1_epi32(1));
  }
  static __m512 powers_of_two(__m512i n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }

 private:
  static constexpr int kBits = 23;

  void set(const __m512 (&all)[8], const __m512i (&above)[4], __m512i bits, bool by_lanes) {
    // With rests, bfloat16 numbers keep their full value. Other numbers are intermediate results of `experts`, which
    // may be rounded: most lose less than a conversion to bfloat16, and small ones next to a large one less than a
    // sixteenth.
    const bool bfloat16 = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff)) == 0;
    const __m512 bearable = _mm512_set1_ps(bfloat16 ? 0x1p-8f : 0x1p-4f);
    // Makes signed digits from -128 to 127: adds 128 to each byte, with carries, and subtracts it without carries.
    const __m512i half = _mm512_set1_epi32(0x808080);
    const __m512i all_bits = _mm512_set1_epi32(kBits);
    __m512i excess[4] = {};  // eight for each number with a rest, minus one for each number that is not 0
    for (int64_t i = 0; i < 8; ++i) {
      const __m512 unit = powers_of_two(_mm512_sub_epi32(above[i % 4], all_bits));
      const __m512 of_unit = _mm512_mul_ps(all[i], powers_of_two(_mm512_sub_epi32(all_bits, above[i % 4])));
      const __m512i number = _mm512_cvtps_epi32(of_unit);
      const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(number, half), half);
      const __m512 worth_it = _mm512_mul_ps(_mm512_abs_ps(all[i]), bearable);
      const auto lacking = [&](__m512i digits, __m512& lost) {
        lost = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(digits), unit, all[i]);
        const __mmask16 some = _mm512_cmp_ps_mask(_mm512_abs_ps(lost), worth_it, _CMP_GE_OQ);
        return _mm512_mask_cmp_ps_mask(some, lost, _mm512_setzero_ps(), _CMP_NEQ_OQ);
      };
      __m512 lost;
      const __m512i last = _mm512_srai_epi32(_mm512_slli_epi32(bytes, 24), 24);
      const __mmask16 of_two = lacking(_mm512_sub_epi32(number, last), lost);
      const __mmask16 not_zero = _mm512_test_epi32_mask(number, number);
      excess[i % 4] = _mm512_mask_add_epi32(excess[i % 4], of_two, excess[i % 4], _mm512_set1_epi32(8));
      excess[i % 4] = _mm512_mask_sub_epi32(excess[i % 4], not_zero, excess[i % 4], _mm512_set1_epi32(1));
      const __mmask16 of_three = lacking(number, lost);
      _mm512_store_ps(rest + 16 * i, _mm512_maskz_mov_ps(of_three, lost));
      whole &= of_three == 0;
      for (int64_t d = 0; d < kCount; ++d) {
        const __m512i digit = _mm512_srli_epi32(bytes, static_cast<unsigned>(8 * (kCount - 1 - d)));
        _mm_store_si128(reinterpret_cast<__m128i*>(digits[d] + 16 * i), _mm512_cvtepi32_epi8(digit));
      }
      if (i < 4) _mm_store_ps(units + 4 * i, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, unit)));
    }
    two = few(excess, by_lanes);
    whole |= two;
  }
  // Whether the sum of each four lanes of a vector, or of all lanes, is not positive.
  static bool few(const __m512i (&excess)[4], bool by_lanes) {
    __mmask16 many = 0;
    for (__m512i some : excess) {
      some = _mm512_add_epi32(some, _mm512_shuffle_epi32(some, _MM_PERM_CDAB));
      some = _mm512_add_epi32(some, _mm512_shuffle_epi32(some, _MM_PERM_BADC));
      many |= _mm512_cmpgt_epi32_mask(some, _mm512_setzero_si512());
    }
    if (by_lanes) return many == 0;
    const __m512i low = _mm512_add_epi32(excess[0], excess[1]), high = _mm512_add_epi32(excess[2], excess[3]);
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high)) <= 0;
  }
  // Sets all lanes to the largest of each four lanes, or of all.
  static void largest(__m512 (&most)[4], bool by_lanes) {
    if (by_lanes) {
      for (__m512& some : most) {
        some = _mm512_max_ps(some, _mm512_permute_ps(some, 0xb1));
        some = _mm512_max_ps(some, _mm512_permute_ps(some, 0x4e));
      }
    } else {
      const __m512 both = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
      std::fill_n(most, 4, _mm512_set1_ps(_mm512_reduce_max_ps(both)));
    }
  }
};

// Whether the processor can unpack these numbers and multiply them as integers.
template <class Numbers>
bool integers_available() {
  constexpr bool kNeedsVbmi = requires { requires Numbers::kNeedsVbmi; };
  return vnni_available() && (!kNeedsVbmi || vbmi_available());
}

// The sums of the lanes of four vectors.
inline __m128 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto fold = [](__m512 x, __m512 y) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)));
  };
  const __m512d first = fold(a, b), second = fold(c, d);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// An order of 128 columns: in runs of 16, first halves, then second halves; runs of the first and of the last 64
// columns alternate. A lane sums 8 columns, which share a scale.
inline constexpr auto kHalvesOf16 = [] {
  std::array<uint8_t, 128> columns{};
  for (int i = 0; i < 128; ++i) {
    columns[i] = static_cast<uint8_t>(i % 16 / 8 * 64 + i % 64 / 16 * 16 + i / 64 * 8 + i % 8);
  }
  return columns;
}();
// Puts the columns 0 to 63 and 64 to 127 in the order kHalvesOf16.
inline void halves_of_16(__m512i low, __m512i high, __m512i (&to)[2]) {
  to[0] = _mm512_unpacklo_epi64(low, high);
  to[1] = _mm512_unpackhi_epi64(low, high);
}

// Writes 128 numbers in an order of columns in which each 16 are from at most two runs of 16.
template <std::array<uint8_t, 128> columns>
[[gnu::always_inline]] inline void put_in_order(const float* from, float* to) {
  struct alignas(64) Some {
    int32_t lanes[16];  // 0 to 15 of the first run, 16 to 31 of the second
    int first, second;
  };
  static constexpr auto kAll = [] {
    std::array<Some, 8> all{};
    for (int i = 0; i < 8; ++i) {
      Some& some = all[i];
      some.first = some.second = columns[16 * i] / 16;
      for (int l = 0; l < 16; ++l) {
        const int column = columns[16 * i + l], run = column / 16;
        if (run != some.first && some.second == some.first) some.second = run;
        some.lanes[l] = run == some.first ? column % 16 : run == some.second ? 16 + column % 16 : -1;
      }
    }
    return all;
  }();
  static_assert(std::ranges::none_of(kAll, [](const Some& some) { return std::ranges::count(some.lanes, -1) > 0; }));
  MOE_METAL_UNROLL for (int i = 0; i < 8; ++i) {
    const __m512 first = _mm512_loadu_ps(from + 16 * kAll[i].first),
                 second = _mm512_loadu_ps(from + 16 * kAll[i].second);
    _mm512_store_ps(to + 16 * i, _mm512_permutex2var_ps(first, _mm512_load_si512(kAll[i].lanes), second));
  }
}

// Weights as unsigned integers: codes, or e2m1 times 2, plus the middle.
template <int bits, bool kE2m1s>
struct Integers {
  static constexpr int kBits = bits;
  static constexpr bool kOffset = !kE2m1s, kScalesOfLanes = false;
  static constexpr int kMiddle = kE2m1s ? 12 : 1 << (bits - 1);
  static constexpr float kUnit = kE2m1s ? 0.5f : 1;
  static constexpr bool kNeedsVbmi = bits != 4 && bits != 8;

  // 128 columns. With 4 bits, the even ones, then the odd ones, so that a lane sums eight neighbours.
  static constexpr auto kOrder = [] {
    if (bits != 4) return kHalvesOf16;
    std::array<uint8_t, 128> columns{};
    for (int i = 0; i < 128; ++i) columns[i] = static_cast<uint8_t>(i % 64 * 2 + i / 64);
    return columns;
  }();
  static constexpr int kColumns = 8, kBytes = bits;
  [[gnu::always_inline]] static inline void unpack(const uint8_t* row, int64_t chunk, int64_t columns,
                                                   __m512i (&to)[2]) {
    const uint8_t* from = row + chunk * 16 * bits;
    const int64_t left = columns - chunk * 128;
    if constexpr (bits == 4) {
      split(load(from, left), to);
    } else {
      halves_of_16(in_order(from, left), in_order(from + 8 * bits, left - 64), to);
    }
  }

 private:
  // With 4 bits: the even codes of 64 bytes, then the odd ones.
  [[gnu::always_inline]] static inline void split(__m512i bytes, __m512i (&to)[2]) {
    to[0] = half(bytes), to[1] = half(_mm512_srli_epi16(bytes, 4));
  }
  // With other widths: the codes of 64 columns.
  [[gnu::always_inline]] static inline __m512i in_order(const uint8_t* from, int64_t left) {
    const __m512i bytes = load(from, left);
    if constexpr (bits == 8) return bytes;
    // Each 64 bits get the bytes of eight codes; then each byte gets the bits of one code. These are assembly, because
    // the functions around it are compiled for processors without VBMI as well.
    __m512i codes;
    asm("vpermb %1, %2, %0" : "=v"(codes) : "v"(bytes), "v"(_mm512_load_si512(kBytesOfEights.data())));
    asm("vpmultishiftqb %0, %1, %0" : "+v"(codes) : "v"(_mm512_load_si512(kShifts.data())));
    return _mm512_and_si512(codes, _mm512_set1_epi8((1 << bits) - 1));
  }

  alignas(64) static constexpr auto kBytesOfEights = [] {
    std::array<uint8_t, 64> bytes{};
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i / 8 * bits + i % 8);
    return bytes;
  }();
  alignas(64) static constexpr auto kShifts = [] {
    std::array<uint8_t, 64> shifts{};
    for (int i = 0; i < 64; ++i) shifts[i] = static_cast<uint8_t>(i % 8 * bits);
    return shifts;
  }();
  // The bytes of 64 columns, or with 4 bits of 128. Those of the columns from `left` on are 0.
  [[gnu::always_inline]] static inline __m512i load(const uint8_t* from, int64_t left) {
    constexpr int64_t kMost = bits == 4 ? 64 : 8 * bits;
    const int64_t count = std::min<int64_t>(left / 8 * bits, kMost);
    if (count == 64) return _mm512_loadu_si512(from);  // GCC copies a masked load to the stack to read it twice
    return _mm512_maskz_loadu_epi8(count > 0 ? ~0ull >> (64 - count) : 0, from);
  }
  // The numbers in the low halves of bytes.
  [[gnu::always_inline]] static inline __m512i half(__m512i bytes) {
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
};

}  // namespace moe_metal
