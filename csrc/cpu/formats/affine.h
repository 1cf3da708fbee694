// Format affine: integers with a scale and an offset per group of columns.
#pragma once
#include "cpu/arm/integer_dots.h"
#include "cpu/formats/codes.h"

namespace moe_metal {

template <int bits>
struct Affine : InARow<Codes<bits>, 8, bits> {
  static constexpr bool kOffset = true, kOwnScales = false;
  static constexpr float kUnit = 1, kMiddle = 1 << (bits - 1);
  using Dots = arm::IntegerDots<arm::Integers<bits, false>>;
};

}  // namespace moe_metal
