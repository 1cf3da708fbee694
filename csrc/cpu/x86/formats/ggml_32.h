// GGML's blocks of 32 columns for AVX-512.
#pragma once
#include "cpu/formats/ggml_32.h"
#include "cpu/x86/formats/blocks.h"

namespace moe_metal::x86 {

// Of: the block's portable struct.
template <class Of>
struct BlocksOf32 : Of {
  using Portable = Of;
  using Of::kBytes, Of::kCodes, Of::kOffset;
  [[gnu::always_inline]] static void scale_of_block(const uint8_t* block, float& scale, float& offset) {
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(load_word(block))));
    scale = both[0], offset = both[1];
  }
  static constexpr auto kOrder = kHalvesOf32;
  static constexpr bool kScalesOfLanes = !kOffset;
  // The scales of four blocks. Past the end of the row the last block's is repeated.
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t columns) {
    const uint8_t* first = row + chunk * 4 * kBytes;
    const int64_t last = columns / 32 - 1 - chunk * 4;
    int64_t halves = 0;
    for (int64_t b = 3; b >= 0; --b) {
      uint16_t half;
      std::memcpy(&half, first + std::min(b, last) * kBytes, sizeof(half));
      halves = halves << 16 | half;
    }
    const __m512i blocks = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(blocks, _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(halves))));
  }
  // 16 bytes of each of four blocks. Past the end of the row the last block is repeated, to be multiplied by zeros.
  [[gnu::always_inline]] static __m512i bytes_of_four(const uint8_t* row, int64_t chunk, int64_t blocks, int at) {
    const uint8_t* first = row + chunk * 4 * kBytes + at;
    const int64_t last = blocks - 1 - chunk * 4;
    if (last >= 3) return four_times_16(first, first + kBytes, first + 2 * kBytes, first + 3 * kBytes);
    return four_times_16(first, first + std::min<int64_t>(1, last) * kBytes,
                         first + std::min<int64_t>(2, last) * kBytes, first + std::min<int64_t>(3, last) * kBytes);
  }
  [[gnu::always_inline]] static void nibbles_of_four(const uint8_t* row, int64_t chunk, int64_t blocks,
                                                     __m512i (&to)[2]) {
    const __m512i both = bytes_of_four(row, chunk, blocks, kCodes);
    to[0] = low_nibbles(both), to[1] = high_nibbles(both);
  }
};

template <class Of>
struct FourBits : BlocksOf32<Of> {
  static constexpr int kBits = 4;
  static constexpr int number(int code) { return code; }
  static __m512i words(const uint8_t* block, int64_t) { return words_of_nibbles(block + Of::kCodes); }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    FourBits::nibbles_of_four(row, chunk, columns / 32, to);
  }
};
using Q4_0 = FourBits<moe_metal::Q4_0>;
using Q4_1 = FourBits<moe_metal::Q4_1>;

template <class Of, const std::array<uint8_t, 16>& values>
struct LookedUp : FourBits<Of> {
  static constexpr int number(int code) { return values[code]; }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    LookedUp::nibbles_of_four(row, chunk, columns / 32, to);
    to[0] = look_up(values, to[0]), to[1] = look_up(values, to[1]);
  }
};
using Iq4Nl = LookedUp<moe_metal::Iq4Nl, kNonLinear>;
struct GgmlMxfp4 : LookedUp<moe_metal::GgmlMxfp4, kTwiceE2m1> {
  static constexpr bool kScalesOfLanes = false;
  [[gnu::always_inline]] static void scale_of_block(const uint8_t* block, float& scale, float&) {
    scale = Portable::scale_of_block(block);
  }
};

template <class Of>
struct FiveBits : BlocksOf32<Of> {
  static constexpr int kBits = 5;
  static constexpr int number(int code) { return code; }
  static constexpr int kHigh = Of::kCodes - 4;  // where the highest bits begin
  static __m512i words(const uint8_t* block, int64_t) {
    const __m512i high = _mm512_maskz_set1_epi16(load_word(block + kHigh), 16);
    return with_bit<4>(high, words_of_nibbles(block + Of::kCodes));
  }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    const int64_t blocks = columns / 32, last = blocks - 1 - chunk * 4;
    FiveBits::nibbles_of_four(row, chunk, blocks, to);
    const uint8_t* first = row + chunk * 4 * Of::kBytes + kHigh;
    uint64_t low = 0, high = 0;
    for (int64_t b = 0; b < 4; ++b) {
      const uint64_t word = load_word(first + std::min(b, last) * Of::kBytes);
      low |= (word & 0xffff) << 16 * b;
      high |= (word >> 16) << 16 * b;
    }
    to[0] = _mm512_mask_add_epi8(to[0], low, to[0], mask_of(16));
    to[1] = _mm512_mask_add_epi8(to[1], high, to[1], mask_of(16));
  }
};
using Q5_0 = FiveBits<moe_metal::Q5_0>;
using Q5_1 = FiveBits<moe_metal::Q5_1>;

struct Q8_0 : BlocksOf32<moe_metal::Q8_0> {
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    const uint8_t* first = row + chunk * 4 * kBytes + kCodes;
    const int64_t last = columns / 32 - 1 - chunk * 4;
    const auto two = [&](int64_t b) {
      return two_times_32(first + std::min(b, last) * kBytes, first + std::min(b + 1, last) * kBytes);
    };
    const __m512i low = two(0), high = two(2);
    to[0] = _mm512_xor_si512(_mm512_shuffle_i64x2(low, high, 0x88), mask_of(0x80));
    to[1] = _mm512_xor_si512(_mm512_shuffle_i64x2(low, high, 0xdd), mask_of(0x80));
  }
  static __m256i bytes(const uint8_t* block, int64_t) { return load_256(block + kCodes); }
};

}  // namespace moe_metal::x86
