// The readers of consecutive numbers with what AVX-512 adds to them.
#pragma once
#include "cpu/formats/affine.h"
#include "cpu/formats/e2m1.h"
#include "cpu/formats/e4m3.h"
#include "cpu/x86/bfloat16_dots.h"
#include "cpu/x86/bytes_512.h"
#include "cpu/x86/integer_panels.h"

namespace moe_metal::x86 {

// Codes of up to 5 bits, which are looked up in a table of their values.
template <int bits, bool is_e2m1>
struct FewCodes {
  // The values of the first 16 codes, and of the others (up to 4 bits: the same again).
  static Vec values(int half) {
    const Vec first = Vec::loadu(kFewBits<bits, is_e2m1>.data());
    return bits == 5 && half ? first + Vec(16) : first;
  }
  // 32 codes as words. The bits above a code are undefined.
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i words(const uint8_t* from) {
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
};

template <int bits>
struct Affine : moe_metal::Affine<bits> {
  using Portable = moe_metal::Affine<bits>;
  using Dots = FewDots<Integers<bits, false>>;
  using Panels = IntegerPanels<Integers<bits, false>>;
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i words(const uint8_t* row, int64_t column)
    requires(bits <= 5)
  {
    return FewCodes<bits, false>::words(row + column * bits / 8);
  }
  static Vec values(int half) { return FewCodes<bits, false>::values(half); }
};

struct E2m1 : moe_metal::E2m1 {
  using Portable = moe_metal::E2m1;
  using Dots = FewDots<Integers<4, true>>;
  using Panels = IntegerPanels<Integers<4, true>>;
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i words(const uint8_t* row, int64_t column) {
    return FewCodes<4, true>::words(row + column / 2);
  }
  static Vec values(int half) { return FewCodes<4, true>::values(half); }
};

template <class Of>
struct E4m3Codes : Of {
  using Portable = Of;
  using Dots = E4m3Dots<Of::kGroup>;
  using Panels = NoPanels;
};
using E4m3Blocks = E4m3Codes<moe_metal::E4m3Blocks>;
using E4m3Groups = E4m3Codes<moe_metal::E4m3Groups>;

}  // namespace moe_metal::x86
