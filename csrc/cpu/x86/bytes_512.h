// Steps that the readers of packed weights for AVX-512 consist of.
#pragma once
#include "cpu/vector/bytes.h"

namespace moe_metal {

// Calls use(i, bytes) for each 16 bytes of a vector.
template <class Use>
[[gnu::always_inline]] inline void each_sixteen(__m256i all, Use&& use) {
  use(0, _mm256_castsi256_si128(all)), use(1, _mm256_extracti128_si256(all, 1));
}
template <class Use>
[[gnu::always_inline]] inline void each_sixteen(__m512i all, Use&& use) {
  use(0, _mm512_castsi512_si128(all)), use(1, _mm512_extracti32x4_epi32(all, 1));
  use(2, _mm512_extracti32x4_epi32(all, 2)), use(3, _mm512_extracti32x4_epi32(all, 3));
}

// Loads once: compilers repeat an unaligned load for each of its uses, and most of these touch two cache lines.
inline __m512i load_512(const uint8_t* from) {
  __m512i all = _mm512_loadu_si512(from);
  asm("" : "+v"(all));
  return all;
}
inline __m256i load_256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m128i load_128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
// Loads 16 bytes from each of four addresses.
inline __m512i four_times_16(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(a)), load_128(b), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(c)), load_128(d), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// Loads 32 bytes from each of two addresses.
inline __m512i two_times_32(const uint8_t* a, const uint8_t* b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_256(a)), load_256(b), 1);
}
inline __m512i mask_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, mask_of(15)); }
inline __m512i high_nibbles(__m512i bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
// a | (b & mask)
inline __m512i or_masked(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }
// Widens 32 bytes to words and shifts them right.
inline __m512i words_shifted(__m256i bytes, int64_t shift) {
  return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(static_cast<int16_t>(shift)));
}
// The low halves of 16 bytes, then the high halves, as words.
inline __m512i words_of_nibbles(const uint8_t* from) {
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load_128(from))), shifts);
}
inline __m512i look_up(const std::array<uint8_t, 16>& values, __m512i codes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_128(values.data())), codes);
}
// Takes bit `bit` of each word from a, and the other bits from b.
template <int bit>
inline __m512i with_bit(__m512i a, __m512i b) {
  constexpr int kFirstWhereThird = 0xe4;  // c ? a : b
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(1 << bit), kFirstWhereThird);
}

// A vector with the same number in each word of a quarter.
template <int a, int b, int c, int d>
inline __m512i in_quarters() {
  const auto of = [](int shift) { return static_cast<int64_t>(shift * 0x0001000100010001LL); };
  return _mm512_setr_epi64(of(a), of(a), of(b), of(b), of(c), of(c), of(d), of(d));
}
// Shifts each quarter by a different number of bits, plus `more`. Bits of neighbouring bytes are shifted in.
template <int a, int b, int c, int d>
inline __m512i quarters_shifted(__m512i bytes, int more = 0) {
  const __m512i shifts = in_quarters<a, b, c, d>();
  return _mm512_srlv_epi16(bytes, _mm512_add_epi16(shifts, _mm512_set1_epi16(static_cast<int16_t>(more))));
}

}  // namespace moe_metal
