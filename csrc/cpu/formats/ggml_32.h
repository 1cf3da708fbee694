// GGML's blocks of 32 columns: a scale in float16, in some formats an offset, and the codes. The low halves of 16 bytes
// with 4-bit codes are columns 0 to 15, the high halves columns 16 to 31.
#pragma once
#include "cpu/formats/blocks.h"

namespace moe_metal {

// codes_at: where the bytes of codes begin in a block.
template <int bytes, int codes_at, bool has_offset, int middle>
struct BlocksOf32 {
  static constexpr int kColumns = 32, kBytes = bytes, kGroup = 32, kCodes = codes_at, kMiddle = middle;
  static constexpr bool kOffset = has_offset;
  static constexpr float kUnit = 1;

  static constexpr int number(int code) { return code; }
  static Bytes nibbles(const uint8_t* block, int64_t column) {
    const Bytes both = load_bytes(block + kCodes);
    return shifted(both, column / 16 * 4, 15);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    halves(row, kBytes, blocks, scale);
    if constexpr (kOffset) halves(row + 2, kBytes, blocks, offset);
  }
#ifdef MOE_METAL_HAS_AVX512
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
#endif
};

template <int bytes, int codes_at, bool has_offset, int middle>
struct FourBits : BlocksOf32<bytes, codes_at, has_offset, middle> {
  using Base = BlocksOf32<bytes, codes_at, has_offset, middle>;
  static constexpr int kBits = 4;
  static Bytes codes(const uint8_t* block, int64_t column) { return Base::nibbles(block, column); }
#ifdef MOE_METAL_HAS_AVX512
  static __m512i words(const uint8_t* block, int64_t) { return words_of_nibbles(block + codes_at); }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    Base::nibbles_of_four(row, chunk, columns / 32, to);
  }
#endif
};
using Q4_0 = FourBits<18, 2, false, 8>;
using Q4_1 = FourBits<20, 4, true, 8>;

// 4-bit codes that are indices into a table.
template <int bytes, int codes_at, int middle, const std::array<uint8_t, 16>& values>
struct LookedUp : BlocksOf32<bytes, codes_at, false, middle> {
  using Base = BlocksOf32<bytes, codes_at, false, middle>;
  static constexpr int kBits = 4;
  static constexpr int number(int code) { return values[code]; }
  static Bytes codes(const uint8_t* block, int64_t column) { return look_up(values, Base::nibbles(block, column)); }
#ifdef MOE_METAL_HAS_AVX512
  static __m512i words(const uint8_t* block, int64_t) { return words_of_nibbles(block + codes_at); }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    Base::nibbles_of_four(row, chunk, columns / 32, to);
    to[0] = look_up(values, to[0]), to[1] = look_up(values, to[1]);
  }
#endif
};
// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89 and 113, plus 128.
inline constexpr std::array<uint8_t, 16> kNonLinear = {1,   24,  45,  63,  79,  93,  106, 118,
                                                       129, 141, 153, 166, 181, 197, 217, 241};
using Iq4Nl = LookedUp<18, 2, 128, kNonLinear>;

// Twice e2m1, plus 12; scales are half as large to compensate.
inline constexpr std::array<uint8_t, 16> kTwiceE2m1 = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
struct GgmlMxfp4 : LookedUp<17, 1, 12, kTwiceE2m1> {
  static constexpr bool kScalesOfLanes = false;
  [[gnu::always_inline]] static void scale_of_block(const uint8_t* block, float& scale, float&) {
    const uint32_t e = *block;
    scale = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    float none;
    for (int64_t b = 0; b < blocks; ++b) scale_of_block(row + b * kBytes, scale[b], none);
  }
};

// 5-bit codes; the highest bits of all columns are stored together.
template <int bytes, int high_at, bool has_offset>
struct FiveBits : BlocksOf32<bytes, high_at + 4, has_offset, 16> {
  using Base = BlocksOf32<bytes, high_at + 4, has_offset, 16>;
  static constexpr int kBits = 5;
  static Bytes codes(const uint8_t* block, int64_t column) {
    return Base::nibbles(block, column) | bits_as_bytes(block + high_at + column / 8, 16);
  }
#ifdef MOE_METAL_HAS_AVX512
  static __m512i words(const uint8_t* block, int64_t) {
    const __m512i high = _mm512_maskz_set1_epi16(load_word(block + high_at), 16);
    return with_bit<4>(high, words_of_nibbles(block + high_at + 4));
  }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    const int64_t blocks = columns / 32, last = blocks - 1 - chunk * 4;
    Base::nibbles_of_four(row, chunk, blocks, to);
    const uint8_t* first = row + chunk * 4 * bytes + high_at;
    uint64_t low = 0, high = 0;
    for (int64_t b = 0; b < 4; ++b) {
      const uint64_t word = load_word(first + std::min(b, last) * bytes);
      low |= (word & 0xffff) << 16 * b;
      high |= (word >> 16) << 16 * b;
    }
    to[0] = _mm512_mask_add_epi8(to[0], low, to[0], mask_of(16));
    to[1] = _mm512_mask_add_epi8(to[1], high, to[1], mask_of(16));
  }
#endif
};
using Q5_0 = FiveBits<22, 2, false>;
using Q5_1 = FiveBits<24, 4, true>;

// Signed bytes, which become unsigned by flipping the highest bit.
struct Q8_0 : BlocksOf32<34, 2, false, 128> {
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    return load_bytes<Some>(block + kCodes + column) ^ 0x80;
  }
#ifdef MOE_METAL_HAS_AVX512
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
#endif
};

}  // namespace moe_metal
