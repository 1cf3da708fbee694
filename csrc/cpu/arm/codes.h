// Unpacks numbers with NEON, sixteen at a time: one vector of bytes, or four of float. No byte is read beyond that of
// the last number.
#pragma once
#include <arm_neon.h>

#include <array>
#include <bit>
#include <cstring>

#include "cpu/vector/vec.h"

namespace moe_metal::arm {

// Converts bytes to floats. Each byte becomes the top byte of a word, which is converted with 24 fraction bits: two
// instructions for four numbers. Widening them step by step takes two and a half.
template <bool is_signed>
[[gnu::always_inline]] inline void to_floats(uint8x16_t bytes, Sixteen& to) {
  unrolled<4>([&](auto v) {
    constexpr uint8_t kNone = 255, at = 4 * v;
    constexpr uint8x16_t kTop = {kNone, kNone, kNone, at,     kNone, kNone, kNone, at + 1,
                                 kNone, kNone, kNone, at + 2, kNone, kNone, kNone, at + 3};
    const uint32x4_t words = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, kTop));
    to[v] = is_signed ? vcvtq_n_f32_s32(vreinterpretq_s32_u32(words), 24) : vcvtq_n_f32_u32(words, 24);
  });
}

// Converts two vectors of eight float16 numbers.
[[gnu::always_inline]] inline void to_floats(uint16x8_t low, uint16x8_t high, Sixteen& to) {
  const auto first = vreinterpretq_f16_u16(low), second = vreinterpretq_f16_u16(high);
  to[0] = vcvt_f32_f16(vget_low_f16(first)), to[1] = vcvt_high_f32_f16(first);
  to[2] = vcvt_f32_f16(vget_low_f16(second)), to[3] = vcvt_high_f32_f16(second);
}

// Unpacks 16 consecutive numbers of `bits` bits to bytes.
template <int bits>
[[gnu::always_inline]] inline uint8x16_t spread(const uint8_t* from) {
  if constexpr (bits == 8) return vld1q_u8(from);
  if constexpr (bits == 4) {
    const uint16x8_t both = vmovl_u8(vld1_u8(from));
    return vandq_u8(vreinterpretq_u8_u16(vsliq_n_u16(both, both, 4)), vdupq_n_u8(15));
  }
  uint64_t low = 0, high = 0;
  std::memcpy(&low, from, std::min(2 * bits, 8));
  if constexpr (bits > 4) std::memcpy(&high, from + 8, 2 * bits - 8);
  const uint8x16_t all = vcombine_u8(vcreate_u8(low), vcreate_u8(high));
  // Each number is within two bytes; the first one has its lowest bit.
  constexpr auto kBytes = [] {
    std::array<uint8_t, 32> bytes{};
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i / 2 * bits / 8 + i % 2);
    return bytes;
  }();
  constexpr auto kShifts = [] {
    std::array<int16_t, 16> shifts{};
    for (int i = 0; i < 16; ++i) shifts[i] = static_cast<int16_t>(-(i * bits % 8));
    return shifts;
  }();
  const auto half = [&](int i) {
    const uint8x16_t pairs = vqtbl1q_u8(all, vld1q_u8(&kBytes[16 * i]));
    return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(pairs), vld1q_s16(&kShifts[8 * i])));
  };
  return vandq_u8(vuzp1q_u8(half(0), half(1)), vdupq_n_u8((1 << bits) - 1));
}

// Integers of `bits` bits, or e2m1.
template <int bits, bool is_e2m1>
[[gnu::always_inline]] inline void code_floats(const uint8_t* from, Sixteen& to) {
  if constexpr (!is_e2m1) return to_floats<false>(spread<bits>(from), to);
  // The upper byte of a float16 is enough to represent each value.
  constexpr uint8x16_t kHigher = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                  0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};
  const uint8x16_t bytes = vqtbl1q_u8(kHigher, spread<4>(from));
  to_floats(vshll_n_u8(vget_low_u8(bytes), 8), vshll_high_n_u8(bytes, 8), to);
}

// Eight e4m3, shifted left by 7, as float16.
[[gnu::always_inline]] inline uint16x8_t half_of_e4m3(int16x8_t shifted) {
  const uint16x8_t half = vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbf80));
  return vorrq_u16(half, vandq_u16(vaddq_u16(half, vdupq_n_u16(0x80)), vdupq_n_u16(0x4000)));
}
[[gnu::always_inline]] inline void e4m3_floats(const uint8_t* from, Sixteen& to) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(from));
  to_floats(half_of_e4m3(vshll_n_s8(vget_low_s8(bytes), 7)), half_of_e4m3(vshll_high_n_s8(bytes, 7)), to);
}

}  // namespace moe_metal::arm
