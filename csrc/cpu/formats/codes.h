// Packed numbers of a row as vectors of float, before their scale. The vector at a column begins at a whole byte, and
// no byte is read beyond its last number's.
//
// A product may have its lanes in any order that both factors have: permute_like_load(x) puts two vectors in the order
// of load_permuted(from), which loads two vectors of numbers.
#pragma once
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "cpu/vector/vec.h"
#ifdef MOE_METAL_HAS_NEON
#include "cpu/arm/codes.h"
#endif

namespace moe_metal {

inline uint32_t load_word(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

#ifndef MOE_METAL_HAS_NEON  // arm/codes.h is for NEON

// The values of codes of up to 4 bits.
using FewBits = std::array<float, 16>;
constexpr FewBits kE2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
template <int bits, bool is_e2m1>
constexpr FewBits kFewBits = [] {
  if (is_e2m1) return kE2m1;
  FewBits values{};
  for (int i = 0; i < 16; ++i) values[i] = i % (1 << std::min(bits, 4));
  return values;
}();

#ifdef MOE_METAL_HAS_AVX512

// Takes bit `bit` of each word from a, and the other bits from b.
template <int bit>
inline __m512i with_bit(__m512i a, __m512i b) {
  constexpr int kFirstWhereThird = 0xe4;  // c ? a : b
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(1 << bit), kFirstWhereThird);
}

// Integers of `bits` bits, or e2m1.
template <int bits, bool is_e2m1 = false>
class Codes {
 public:
  Codes() : table_(_mm512_loadu_ps(kFewBits<bits, is_e2m1>.data())) {
    alignas(64) int32_t shifts[kLanes];
    alignas(64) uint8_t bytes[kLanes][4];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int bit = kBroadcast ? lane * bits % 32 : lane * bits % 8;
      shifts[lane] = bit;
      for (int i = 0; i < 4; ++i) bytes[lane][i] = static_cast<uint8_t>(std::min(lane * bits / 8 + i, 15));
    }
    shifts_ = _mm512_load_si512(shifts);
    bytes_ = _mm512_load_si512(bytes);
  }

  // The values of codes of up to 5 bits: of the first 16 codes, and of the others (up to 4 bits: the same again).
  Vec values(int half) const { return bits == 5 && half ? Vec(table_) + Vec(16) : Vec(table_); }
  // With 4 bits, lanes 0, 2, 4 ... have the first half of a vector's numbers, and lanes 1, 3, 5 ... the second half.
  [[gnu::always_inline]] void load_permuted(const uint8_t* from, Vec (&to)[2]) const {
    to[0] = permuted(from), to[1] = permuted(from + kLanes * bits / 8);
  }
  [[gnu::always_inline]] static void permute_like_load(Vec (&x)[2]) {
    if constexpr (bits != 4) return;
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (Vec& some : x) some = _mm512_permutexvar_ps(order, some);
  }

  [[gnu::always_inline]] Vec operator()(const uint8_t* from) const {
    if constexpr (bits == 8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    } else {
      const __m512i codes = _mm512_srlv_epi32(words(from), shifts_);
      if constexpr (bits <= 4) return _mm512_permutexvar_ps(codes, table_);  // uses only the lower 4 bits
      return _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32((1 << bits) - 1)));
    }
  }

  // 32 codes as words. The bits above a code are undefined.
  [[MOE_METAL_BF16, gnu::always_inline]] inline __m512i as_words(const uint8_t* from) const
    requires(bits <= 5)
  {
    if constexpr (bits == 4) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    }
    // Each 64 bits get the bytes of four codes; then each word gets the bits of one code.
    const __m256i all = _mm256_maskz_loadu_epi8((1u << 4 * bits) - 1, from);
    const __m512i fours = _mm512_permutexvar_epi8(_mm512_load_si512(kBytesOfFours.data()), _mm512_castsi256_si512(all));
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(kShiftsOfWords.data()), fours);
  }

 private:
  alignas(64) static constexpr auto kBytesOfFours = [] {
    std::array<uint8_t, 64> bytes{};
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i / 8 * 4 * bits / 8 + i % 8);
    return bytes;
  }();
  alignas(64) static constexpr auto kShiftsOfWords = [] {
    std::array<uint8_t, 64> shifts{};
    for (int i = 0; i < 64; ++i) shifts[i] = static_cast<uint8_t>(i / 8 * 4 * bits % 8 + i / 2 % 4 * bits);
    return shifts;
  }();
  [[gnu::always_inline]] Vec permuted(const uint8_t* from) const {
    if constexpr (bits != 4) return (*this)(from);
    int64_t all;
    std::memcpy(&all, from, sizeof(all));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(all), halves_), table_);
  }

  static constexpr bool kBroadcast = bits == 2 || bits == 4;  // each half of the lanes needs only one word

  // Words that contain the number of each lane, at bit shifts_.
  [[gnu::always_inline]] __m512i words(const uint8_t* from) const {
    if constexpr (bits == 2) return _mm512_set1_epi32(load_word(from));
    if constexpr (bits == 4) {
      return _mm512_mask_set1_epi32(_mm512_set1_epi32(load_word(from)), 0xff00, load_word(from + 4));
    }
    const __m128i all = _mm_maskz_loadu_epi8((1u << 2 * bits) - 1, from);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), bytes_);
  }

  __m512 table_;
  __m512i shifts_, bytes_;
  __m512i halves_ = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
};

#elif defined(MOE_METAL_HAS_AVX2)

template <int bits, bool is_e2m1 = false>
class Codes {
 public:
  Codes() {
    alignas(32) int32_t shifts[kLanes];
    alignas(32) uint8_t bytes[kLanes][4];
    for (int lane = 0; lane < kLanes; ++lane) {
      shifts[lane] = lane * bits % 8;
      for (int i = 0; i < 4; ++i) bytes[lane][i] = static_cast<uint8_t>(std::min(lane * bits / 8 + i, 15));
    }
    shifts_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts));
    bytes_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  }

  [[gnu::always_inline]] Vec operator()(const uint8_t* from) const {
    if constexpr (bits == 8) return _mm256_cvtepi32_ps(eight_words(from));
    const __m256i words = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(bytes_of_eight(from)), bytes_);
    return values(_mm256_srlv_epi32(words, shifts_));
  }
  // With 4 bits, the even numbers, then the odd ones.
  [[gnu::always_inline]] void load_permuted(const uint8_t* from, Vec (&to)[2]) const {
    if constexpr (bits == 4) {
      const __m256i both = eight_words(from);
      const __m256i odd = _mm256_srli_epi32(both, 4);
      to[0] = values(both), to[1] = is_e2m1 ? values(odd) : Vec(_mm256_cvtepi32_ps(odd));
    } else {
      to[0] = (*this)(from), to[1] = (*this)(from + bits);
    }
  }
  [[gnu::always_inline]] static void permute_like_load(Vec (&x)[2]) {
    if constexpr (bits == 4) std::tie(x[0], x[1]) = at::vec::deinterleave2(x[0], x[1]);
  }

  // Words of several columns are transposed before they are unpacked.
  static int64_t transposed_columns() { return kLanes * kInAWord; }
  template <class Use>
  static void transposed(const uint8_t* rows, int64_t step, Use&& use)
    requires(32 % bits == 0)
  {
    Vec words[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) words[r] = Vec::loadu(rows + r * step);
    transpose(words);
    MOE_METAL_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      MOE_METAL_UNROLL for (int64_t j = 0; j < kInAWord; ++j) {
        use(i * kInAWord + j, values(_mm256_srli_epi32(_mm256_castps_si256(words[i]), static_cast<int>(j * bits))));
      }
    }
  }

 private:
  static constexpr int64_t kInAWord = 32 / bits;
  // The bytes of eight numbers. If 3, 5 or 6 bytes are copied to a variable of 8, compilers store them in two parts,
  // and the processor waits for both before it loads the whole.
  [[gnu::always_inline]] static __m128i bytes_of_eight(const uint8_t* from) {
    const auto part = [&](auto some, int at) __attribute__((always_inline)) -> int64_t {
      std::memcpy(&some, from + at, sizeof(some));
      return some;
    };
    if constexpr (bits == 2) return _mm_cvtsi64_si128(part(uint16_t(), 0));
    if constexpr (bits == 3) return _mm_cvtsi64_si128(part(uint16_t(), 0) | part(uint8_t(), 2) << 16);
    if constexpr (bits == 4) return _mm_cvtsi64_si128(part(uint32_t(), 0));
    if constexpr (bits == 5) return _mm_cvtsi64_si128(part(uint32_t(), 0) | part(uint8_t(), 4) << 32);
    if constexpr (bits == 6) return _mm_cvtsi64_si128(part(uint32_t(), 0) | part(uint16_t(), 4) << 32);
  }
  // Eight bytes as words of 32 bits.
  [[gnu::always_inline]] static __m256i eight_words(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  // The values of the lowest bits of each word.
  [[gnu::always_inline]] static Vec values(__m256i words) {
    if constexpr (is_e2m1) {  // a table of the magnitudes, which needs only three bits, and the sign
      const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1.data()), words);
      const __m256i signs = _mm256_and_si256(_mm256_slli_epi32(words, 28), _mm256_set1_epi32(INT32_MIN));
      return _mm256_xor_ps(magnitudes, _mm256_castsi256_ps(signs));
    }
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32((1 << bits) - 1)));
  }

  __m256i shifts_, bytes_;
};

#else

template <int bits, bool is_e2m1 = false>
class Codes {
 public:
  Codes() {
    for (int i = 0; i < 1 << bits; ++i) values_[i] = bits <= 4 ? kFewBits<bits, is_e2m1>[i % 16] : i;
  }

  Vec operator()(const uint8_t* from) const {
    uint64_t all = 0;
    std::memcpy(&all, from, kLanes * bits / 8);
    float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = values_[all >> lane * bits & ((1 << bits) - 1)];
    }
    return Vec::loadu(lanes);
  }

 private:
  std::array<float, 1 << bits> values_;
};

#endif

using E2m1Codes = Codes<4, true>;

#ifdef MOE_METAL_HAS_AVX2

// e4m3 as float16. Its exponent is wider, so subnormal numbers need no special case. The magnitude 127 is NaN: adding
// 0x80 carries into a bit that marks it.
class E4m3 {
 public:
  static constexpr float kUnit = 256;  // a value is kUnit times a number of load_permuted()
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* from, Count count) const {
    if constexpr (std::is_same_v<Count, Whole>) return load(from) * Vec(kUnit);
    uint8_t some[kLanes] = {};
    std::memcpy(some, from, count);
    return load(some) * Vec(kUnit);
  }
  [[gnu::always_inline]] static void permute_like_load(Vec (&)[2]) {}

#ifdef MOE_METAL_HAS_AVX512
  [[gnu::always_inline]] static void load_permuted(const uint8_t* from, Vec (&to)[2]) {
    to[0] = load(from), to[1] = load(from + kLanes);
  }

 private:
  [[gnu::always_inline]] static Vec load(const uint8_t* from) { return _mm512_cvtph_ps(sixteen(from)); }
#else
  [[gnu::always_inline]] static void load_permuted(const uint8_t* from, Vec (&to)[2]) {
    const __m256i both = sixteen(from);
    to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(both)), to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
  }

 private:
  [[gnu::always_inline]] static Vec load(const uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(sixteen(bytes)));
  }
#endif
  [[gnu::always_inline]] static __m256i sixteen(const uint8_t* from) {
    return sixteen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  [[gnu::always_inline]] static __m256i sixteen(__m128i bytes) {
    const __m256i wide = _mm256_cvtepi8_epi16(bytes);
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
    return _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
  }
};

#else

class E4m3 {
 public:
  static constexpr float kUnit = 1;
  E4m3() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
      values_[i] = (i & 127) == 127 ? NAN : i < 128 ? magnitude : -magnitude;
    }
  }
  template <class Count>
  Vec operator()(const uint8_t* from, Count count) const {
    float lanes[kLanes] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = values_[from[lane]];
    return Vec::loadu(lanes);
  }

 private:
  std::array<float, 256> values_;
};

#endif

#endif

// The base of readers of consecutive numbers without blocks; weights/packed_rows.h describes readers.
template <class CodesOf, int columns, int bytes>
struct InARow {
  static constexpr int kColumns = columns, kBytes = bytes, kGroup = 0, kUsualGroup = 64, kAtOnce = 2;
  CodesOf codes;
#ifdef MOE_METAL_HAS_NEON
  [[gnu::always_inline]] void floats(const uint8_t* row, int64_t column, Sixteen& to) const {
    codes.floats(row + column * bytes / columns, to);
  }
#else
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count count) const {
    const uint8_t* from = row + column * bytes / columns;
    if constexpr (requires { codes(from, count); })
      return codes(from, count);
    else
      return codes(from);
  }
  [[gnu::always_inline]] void load_permuted(const uint8_t* row, int64_t column, Vec (&to)[2]) const {
    codes.load_permuted(row + column * bytes / columns, to);
  }
#endif
  static int64_t transposed_columns() { return CodesOf::transposed_columns(); }
  template <class Use>
  void transposed(const uint8_t* rows, int64_t step, int64_t column, Use&& use) const
    requires requires { CodesOf::transposed(rows, step, use); }
  {
    CodesOf::transposed(rows + column * bytes / columns, step, use);
  }
#ifdef MOE_METAL_HAS_AVX512
  [[MOE_METAL_BF16, gnu::always_inline]] inline __m512i words(const uint8_t* row, int64_t column) const
    requires requires(const CodesOf& some, const uint8_t* from) { some.as_words(from); }
  {
    return codes.as_words(row + column * bytes / columns);
  }
  Vec values(int half) const { return codes.values(half); }
#endif
};

}  // namespace moe_metal
