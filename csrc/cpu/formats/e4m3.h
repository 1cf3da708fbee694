// Formats fp8 and mxfp8: e4m3 with a scale per block of rows and columns, or per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/scaled_rows.h"

namespace moe_metal {

template <int group>
struct E4m3Codes : InARow<E4m3, 1, 1> {
  static constexpr bool kOffset = false, kOwnScales = false;
  static constexpr float kUnit = E4m3::kUnit, kMiddle = 0;
  static constexpr int kGroup = group;
  using Dots = NoDots;
};
using E4m3Blocks = E4m3Codes<128>;
using E4m3Groups = E4m3Codes<32>;

}  // namespace moe_metal
