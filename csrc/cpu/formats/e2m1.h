// Formats mxfp4 and nvfp4: e2m1 with a scale per group of columns.
#pragma once
#include "cpu/arm/integer_dots.h"
#include "cpu/formats/codes.h"

namespace moe_metal {

struct E2m1 : InARow<Codes<4, true>, 2, 1> {
  static constexpr bool kOffset = false, kOwnScales = false;
  static constexpr float kUnit = 1, kMiddle = 0;
  static constexpr int kUsualGroup = 32;
  using Dots = arm::IntegerDots<arm::Integers<4, true>>;
};

}  // namespace moe_metal
