// Format affine: integers, with a scale and an offset for each group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

template <int bits>
struct Affine {
  static constexpr bool kOffset = true, kScalesAreRare = false, kOwnScales = false;
  static constexpr int kColumns = 8, kBytes = bits;
  static constexpr float kUnit = 1, kMiddle = 1 << (bits - 1);
  using Dots = std::conditional_t<bits == 4, IntegerDots<Integers<4, false>>, NoDots>;
  using Tiles = std::conditional_t<bits == 4 || bits == 8, IntegerTiles<Integers<bits, false>>, NoDots>;
  Codes<bits> codes;
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count) const {
    return codes_at(codes, row, column);
  }
  [[gnu::always_inline]] Vec quick(const uint8_t* row, int64_t column) const {
    return codes.quick(row + column * bits / 8);
  }
};

}  // namespace moe_metal
