// Formats fp8 and mxfp8: e4m3 with a scale per block of rows and columns, or per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

template <bool scales_are_rare>
struct E4m3Codes : InARow<E4m3, 1, 1> {
  static constexpr bool kOffset = false, kScalesAreRare = scales_are_rare, kOwnScales = false;
  static constexpr float kUnit = E4m3::kUnit, kMiddle = 0;
  static constexpr int kGroup = scales_are_rare ? 128 : 32;
  using Dots = E4m3Dots;
  using Tiles = NoDots;
  using Panels = NoDots;
};
using E4m3Blocks = E4m3Codes<true>;
using E4m3Groups = E4m3Codes<false>;

}  // namespace moe_metal
