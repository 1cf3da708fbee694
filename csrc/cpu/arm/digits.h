// The numbers of a token as integers of several bytes, for processors that multiply bytes.
#pragma once
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/arm/codes.h"

namespace moe_metal::arm {

// 128 numbers as multiples of a power of two (the unit), in three digits of base 256. If a weight is 0 where the token
// is largest, the small numbers decide. What the digits cannot hold of them is kept in `rest`, which gets separate
// digits.
struct Digits {
  static constexpr int64_t kColumns = 128;
  static constexpr int kCount = 3;

  int8_t digits[kColumns / kSixteen][kCount][kSixteen];  // the most significant first
  float rest[kColumns];                                  // numbers minus the value of their digits
  float unit;                                            // the value of an integer of 1
  bool whole;                                            // every rest is 0

  // Returns false if a number is not finite or the largest is too small; then all digits are 0. Numbers from `count` on
  // are 0. x may be `rest`.
  bool set(const float* x, int64_t count) {
    alignas(16) float all[kColumns] = {};
    std::copy_n(x, count, all);
    float largest = 0;
    uint32_t bits = 0;
    bool finite = true;
    for (const float number : all) {
      finite &= std::abs(number) <= std::numeric_limits<float>::max();
      largest = std::max(largest, std::abs(number));
      bits |= std::bit_cast<uint32_t>(number);
    }
    std::memset(digits, 0, sizeof(digits));
    unit = 0, whole = true;
    if (!finite || (largest > 0 && exponent(largest) < kSmallest)) return false;
    const int above = std::max(exponent(largest), kSmallest) + 1;  // the largest is less than 2^kBits units
    unit = power_of_two(above - kBits);
    const float bearable = (bits & 0xffff) == 0 ? 0x1p-8f : 0x1p-4f;
    for (int64_t i = 0; i < kColumns; i += kSixteen) set(all + i, i, power_of_two(kBits - above), bearable);
    return true;
  }

 private:
  static constexpr int kBits = 22, kSmallest = -100;
  static int exponent(float x) { return static_cast<int>(std::bit_cast<uint32_t>(x) >> 23) - 127; }
  static float power_of_two(int n) { return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

  void set(const float* x, int64_t at, float units, float bearable) {
    // Makes signed digits from -128 to 127: adds 128 to each byte, with carries, and subtracts it without carries.
    constexpr int32_t kHalf = 0x808080;
    for (int64_t i = 0; i < kSixteen; ++i) {
      const auto number = static_cast<int32_t>(std::nearbyint(x[i] * units));
      const float lost = std::fma(-static_cast<float>(number), unit, x[i]);
      const bool lacking = std::abs(lost) >= std::abs(x[i]) * bearable && lost != 0;
      rest[at + i] = lacking ? lost : 0;
      whole &= !lacking;
      const int32_t bytes = (number + kHalf) ^ kHalf;
      for (int d = 0; d < kCount; ++d) {
        digits[at / kSixteen][d][i] = static_cast<int8_t>(bytes >> 8 * (kCount - 1 - d));
      }
    }
  }
};

}  // namespace moe_metal::arm
