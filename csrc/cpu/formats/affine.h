// Format affine: integers with a scale and an offset per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

template <int bits>
struct Affine : InARow<Codes<bits>, 8, bits> {
  static constexpr bool kOffset = true, kScalesAreRare = false, kOwnScales = false;
  static constexpr float kUnit = 1, kMiddle = 1 << (bits - 1);
  using Dots = AffineDots<bits>;
  using Tiles = std::conditional_t<bits == 4 || bits == 8, IntegerTiles<Integers<bits, false>>, NoDots>;
  using Panels = std::conditional_t<bits == 4 || bits == 8, IntegerPanels<Integers<bits, false>>, NoDots>;
};

}  // namespace moe_metal
