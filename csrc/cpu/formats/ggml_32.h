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
  static Bytes nibbles(const uint8_t* block, int64_t column) {
    const Bytes both = load_bytes(block + kCodes);
    return shifted(both, column / 16 * 4, 15);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    halves(row, kBytes, blocks, scale);
    if constexpr (kOffset) halves(row + 2, kBytes, blocks, offset);
  }
};

template <int bytes, int codes_at, bool has_offset, int middle>
struct FourBits : BlocksOf32<bytes, codes_at, has_offset, middle> {
  using Base = BlocksOf32<bytes, codes_at, has_offset, middle>;
  static Bytes codes(const uint8_t* block, int64_t column) { return Base::nibbles(block, column); }
};
using Q4_0 = FourBits<18, 2, false, 8>;
using Q4_1 = FourBits<20, 4, true, 8>;

// 4-bit codes that are indices into a table.
template <int bytes, int codes_at, int middle, const std::array<uint8_t, 16>& values>
struct LookedUp : BlocksOf32<bytes, codes_at, false, middle> {
  using Base = BlocksOf32<bytes, codes_at, false, middle>;
  static Bytes codes(const uint8_t* block, int64_t column) { return look_up(values, Base::nibbles(block, column)); }
};
// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89 and 113, plus 128.
inline constexpr std::array<uint8_t, 16> kNonLinear = {1,   24,  45,  63,  79,  93,  106, 118,
                                                       129, 141, 153, 166, 181, 197, 217, 241};
using Iq4Nl = LookedUp<18, 2, 128, kNonLinear>;

// Twice e2m1, plus 12; scales are half as large to compensate.
inline constexpr std::array<uint8_t, 16> kTwiceE2m1 = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
struct GgmlMxfp4 : LookedUp<17, 1, 12, kTwiceE2m1> {
  static float scale_of_block(const uint8_t* block) {
    const uint32_t e = *block;
    return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b) scale[b] = scale_of_block(row + b * kBytes);
  }
};

// 5-bit codes; the highest bits of all columns are stored together.
template <int bytes, int high_at, bool has_offset>
struct FiveBits : BlocksOf32<bytes, high_at + 4, has_offset, 16> {
  using Base = BlocksOf32<bytes, high_at + 4, has_offset, 16>;
  static Bytes codes(const uint8_t* block, int64_t column) {
    return Base::nibbles(block, column) | bits_as_bytes(block + high_at + column / 8, 16);
  }
};
using Q5_0 = FiveBits<22, 2, false>;
using Q5_1 = FiveBits<24, 4, true>;

// Signed bytes, which become unsigned by flipping the highest bit.
struct Q8_0 : BlocksOf32<34, 2, false, 128> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    return load_bytes<Of>(block + kCodes + column) ^ 0x80;
  }
};

}  // namespace moe_metal
