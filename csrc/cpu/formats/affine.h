// Format affine: integers with a scale and an offset per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

template <int bits>
struct Affine : InARow<Codes<bits>, 8, bits> {
  static constexpr bool kOffset = true, kScalesAreRare = false, kOwnScales = false;
  static constexpr float kUnit = 1, kMiddle = 1 << (bits - 1);
  using Dots = FewDots<Integers<bits, false>>;
  using Tiles = IntegerTiles<Integers<bits, false>>;
  using Panels = IntegerPanels<Integers<bits, false>>;
};

}  // namespace moe_metal
