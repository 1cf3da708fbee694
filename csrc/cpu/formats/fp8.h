// Format fp8: e4m3, with a scale for each block of rows and columns.
#pragma once
#include "cpu/codes.h"
#include "cpu/e4m3_dots.h"

namespace moe_metal {

struct Fp8 {
  static constexpr bool kOffset = false, kScalesAreRare = true;
  static constexpr int kBits = 8;
  static constexpr float kUnit = E4m3::kUnit, kMiddle = 0;
  using Dots = E4m3Dots;
  using Tiles = NoDots;
  E4m3 codes;
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count count) const {
    return codes(row + column, count);
  }
  [[gnu::always_inline]] Vec quick(const uint8_t* row, int64_t column) const { return codes.quick(row + column); }
};

}  // namespace moe_metal
