// Bytes and small numbers in vectors: the steps that readers of packed weights consist of. Each step is plain C++, with
// special instructions where compilers do not find them.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/vector/vec.h"
#ifdef MOE_METAL_HAS_NEON
#include "cpu/arm/codes.h"
#endif

namespace moe_metal {

// 16 or 32 columns of a row. Compilers vectorise operations on them on every processor.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Bytes32 = uint8_t __attribute__((vector_size(32)));
// kLanes columns as words of 32 bits.
using Words = at::vec::Vectorized<int32_t>;

inline uint32_t load_word(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
template <class To = Bytes>
inline To load_bytes(const uint8_t* from) {
  To bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// ------------------------------------------------------------------------------------------------ bytes

// bytes >> shift & mask. Compilers need five instructions for a shift that is only known at run time.
template <class Of>
inline Of shifted(Of bytes, int64_t shift, uint8_t mask) {
#ifdef MOE_METAL_HAS_AVX2
  const __m128i count = _mm_cvtsi64_si128(shift);
  if constexpr (sizeof(Of) == 32)
    return std::bit_cast<Of>(_mm256_srl_epi16(std::bit_cast<__m256i>(bytes), count)) & mask;
  else
    return std::bit_cast<Of>(_mm_srl_epi16(std::bit_cast<__m128i>(bytes), count)) & mask;
#else
  return bytes >> static_cast<uint8_t>(shift) & mask;
#endif
}

// bytes << count, for bytes whose highest `count` bits are 0. Compilers double the bytes `count` times.
template <int count, class Of>
inline Of shifted_left(Of bytes) {
#ifdef MOE_METAL_HAS_AVX2
  if constexpr (sizeof(Of) == 32)
    return std::bit_cast<Of>(_mm256_slli_epi16(std::bit_cast<__m256i>(bytes), count));
  else
    return std::bit_cast<Of>(_mm_slli_epi16(std::bit_cast<__m128i>(bytes), count));
#else
  return bytes << count;
#endif
}

// values[code] for codes below 16.
inline Bytes look_up(const std::array<uint8_t, 16>& values, Bytes codes) {
#if defined(MOE_METAL_HAS_AVX2)
  const auto table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values.data()));
  return std::bit_cast<Bytes>(_mm_shuffle_epi8(table, std::bit_cast<__m128i>(codes)));
#elif defined(MOE_METAL_HAS_NEON)
  return std::bit_cast<Bytes>(vqtbl1q_u8(vld1q_u8(values.data()), std::bit_cast<uint8x16_t>(codes)));
#else
  for (int i = 0; i < 16; ++i) codes[i] = values[codes[i]];
  return codes;
#endif
}

// Expands 16 bits to bytes: 0 or `value`.
inline Bytes bits_as_bytes(const uint8_t* from, uint8_t value) {
  constexpr Bytes kBit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  Bytes both;
#ifdef MOE_METAL_HAS_AVX2  // compilers insert the bytes one by one
  uint16_t word;
  std::memcpy(&word, from, sizeof(word));
  const __m128i bytes = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  both = std::bit_cast<Bytes>(_mm_shuffle_epi8(_mm_cvtsi32_si128(word), bytes));
#else
  for (int i = 0; i < 16; ++i) both[i] = from[i / 8];
#endif
  return reinterpret_cast<Bytes>((both & kBit) != 0) & value;
}

// Signed bytes as floats.
[[gnu::always_inline]] inline void signed_floats(Bytes bytes, Sixteen& to) {
#if defined(MOE_METAL_HAS_NEON)
  arm::to_floats<true>(std::bit_cast<uint8x16_t>(bytes), to);
#elif defined(MOE_METAL_HAS_AVX512)
  to[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(std::bit_cast<__m128i>(bytes)));
#elif defined(MOE_METAL_HAS_AVX2)
  const auto low = std::bit_cast<__m128i>(bytes);
  to[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
  to[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8)));
#else
  int8_t numbers[kSixteen];
  float floats[kSixteen];
  std::memcpy(numbers, &bytes, sizeof(numbers));
  for (int64_t i = 0; i < kSixteen; ++i) floats[i] = numbers[i];
  for (int64_t v = 0; v < kSixteen / kLanes; ++v) to[v] = Vec::loadu(floats + v * kLanes);
#endif
}

// ------------------------------------------------------------------------------------------------ consecutive codes

// kLanes bytes as words.
[[gnu::always_inline]] inline Words bytes_as_words(const uint8_t* from) {
#if defined(MOE_METAL_HAS_AVX512)
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(MOE_METAL_HAS_AVX2)
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  int32_t words[kLanes];
  std::copy_n(from, kLanes, words);
  return Words::loadu(words);
#endif
}

// kLanes codes of `bits` bits, each in the lowest bits of a word. The bits above it are undefined.
template <int bits>
[[gnu::always_inline]] inline Words spread_words(const uint8_t* from) {
  if constexpr (bits == 8) return bytes_as_words(from);
#ifdef MOE_METAL_HAS_AVX2
  // Each word gets the bytes of its code, the first of which has its lowest bit.
  alignas(64) static constexpr auto kBytes = [] {
    std::array<uint8_t, 4 * kLanes> bytes{};
    for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = static_cast<uint8_t>(std::min(i / 4 * bits / 8 + i % 4, 15));
    return bytes;
  }();
  alignas(64) static constexpr auto kShifts = [] {
    std::array<int32_t, kLanes> shifts{};
    for (int i = 0; i < kLanes; ++i) shifts[i] = i * bits % 8;
    return shifts;
  }();
#endif
#if defined(MOE_METAL_HAS_AVX512)
  const __m512i all = _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8((1u << 2 * bits) - 1, from));
  return _mm512_srlv_epi32(_mm512_shuffle_epi8(all, _mm512_load_si512(kBytes.data())),
                           _mm512_load_si512(kShifts.data()));
#elif defined(MOE_METAL_HAS_AVX2)
  // If 3, 5 or 6 bytes are copied to a variable of 8, compilers store them in two parts, and the processor waits for
  // both before it loads the whole.
  const auto part = [&](auto bytes, int at) __attribute__((always_inline)) -> int64_t {
    std::memcpy(&bytes, from + at, sizeof(bytes));
    return bytes;
  };
  const int64_t codes = [&] {
    if constexpr (bits == 2) return part(uint16_t(), 0);
    if constexpr (bits == 3) return part(uint16_t(), 0) | part(uint8_t(), 2) << 16;
    if constexpr (bits == 4) return part(uint32_t(), 0);
    if constexpr (bits == 5) return part(uint32_t(), 0) | part(uint8_t(), 4) << 32;
    return part(uint32_t(), 0) | part(uint16_t(), 4) << 32;
  }();
  const auto constant = [](const auto& values) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(&values)); };
  const __m256i all = _mm256_broadcastq_epi64(_mm_cvtsi64_si128(codes));
  return _mm256_srlv_epi32(_mm256_shuffle_epi8(all, constant(kBytes)), constant(kShifts));
#else
  uint64_t all = 0;
  std::memcpy(&all, from, kLanes * bits / 8);
  int32_t words[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) words[i] = static_cast<int32_t>(all >> i * bits);
  return Words::loadu(words);
#endif
}

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

// The values of the codes in the lowest bits of words.
template <int bits, bool is_e2m1>
[[gnu::always_inline]] inline Vec values_of(const Words& words) {
#ifdef MOE_METAL_HAS_AVX512
  if constexpr (bits <= 4) return _mm512_permutexvar_ps(words, _mm512_loadu_ps(kFewBits<bits, is_e2m1>.data()));
#endif
  if constexpr (!is_e2m1) return at::vec::convert<float>(words & Words((1 << bits) - 1));
#if defined(MOE_METAL_HAS_AVX2) && !defined(MOE_METAL_HAS_AVX512)
  // A table of the magnitudes, which needs only three bits, and the sign.
  const Vec magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1.data()), words);
  return magnitudes ^ at::vec::cast<float>(words << Words(28) & Words(INT32_MIN));
#else
  int32_t codes[kLanes];
  float values[kLanes];
  words.store(codes);
  for (int64_t i = 0; i < kLanes; ++i) values[i] = kE2m1[codes[i] & 15];
  return Vec::loadu(values);
#endif
}

// 16 codes as floats.
template <int bits, bool is_e2m1>
[[gnu::always_inline]] inline void code_floats(const uint8_t* from, Sixteen& to) {
#ifdef MOE_METAL_HAS_NEON
  arm::code_floats<bits, is_e2m1>(from, to);
#else
  unrolled<kSixteen / kLanes>(
      [&](auto v) { to[v] = values_of<bits, is_e2m1>(spread_words<bits>(from + v * kLanes * bits / 8)); });
#endif
}

// ------------------------------------------------------------------------------------------------ e4m3 and e8m0

inline float e4m3(uint8_t code) {
  static const auto values = [] {
    std::array<float, 256> all;
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
      all[i] = (i & 127) == 127 ? NAN : i < 128 ? magnitude : -magnitude;
    }
    return all;
  }();
  return values[code];
}

// 16 numbers in e4m3, in units of kE4m3Unit. With special instructions they are converted through float16, whose
// exponent is wider, so subnormal numbers need no special case. The magnitude 127 is NaN: adding 0x80 carries into a
// bit that marks it.
#if defined(MOE_METAL_HAS_AVX2) || defined(MOE_METAL_HAS_NEON)
constexpr float kE4m3Unit = 256;
#else
constexpr float kE4m3Unit = 1;
#endif
[[gnu::always_inline]] inline void e4m3_floats(const uint8_t* from, Sixteen& to) {
#if defined(MOE_METAL_HAS_NEON)
  arm::e4m3_floats(from, to);
#elif defined(MOE_METAL_HAS_AVX2)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  const __m256i all = _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
#ifdef MOE_METAL_HAS_AVX512
  to[0] = _mm512_cvtph_ps(all);
#else
  to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(all)), to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(all, 1));
#endif
#else
  float floats[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) floats[i] = e4m3(from[i]);
  for (int64_t v = 0; v < kSixteen / kLanes; ++v) to[v] = Vec::loadu(floats + v * kLanes);
#endif
}

// 2^(e - 127); 255 is NaN. Without branches, so that compilers vectorise loops of it well.
inline float e8m0(uint8_t e) {
  const uint32_t highest = 0x00400000u, bits = std::max(uint32_t{e} << 23, highest);
  return std::bit_cast<float>(bits | (e == 255 ? highest : 0));
}

}  // namespace moe_metal
