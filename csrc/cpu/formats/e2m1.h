// Formats mxfp4 and nvfp4: e2m1 with a scale per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

struct E2m1 : InARow<E2m1Codes, 2, 1> {
  static constexpr bool kOffset = false, kScalesAreRare = false, kOwnScales = false;
  static constexpr float kUnit = 1, kMiddle = 0;
  static constexpr int kUsualGroup = 32;
  using Dots = FewDots<Integers<4, true>>;
  using Tiles = IntegerTiles<Integers<4, true>>;
  using Panels = IntegerPanels<Integers<4, true>>;
};

}  // namespace moe_metal
