// Formats mxfp4 and nvfp4: e2m1, with a scale for each group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

struct E2m1 {
  static constexpr bool kOffset = false, kScalesAreRare = false, kOwnScales = false;
  static constexpr int kColumns = 2, kBytes = 1;
  static constexpr float kUnit = 1, kMiddle = 0;
  using Dots = IntegerDots<Integers<4, true>>;
  using Tiles = IntegerTiles<Integers<4, true>>;
  Codes<4> codes{kE2m1};
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count) const {
    return codes_at(codes, row, column);
  }
  [[gnu::always_inline]] Vec quick(const uint8_t* row, int64_t column) const { return codes.quick(row + column / 2); }
};

}  // namespace moe_metal
