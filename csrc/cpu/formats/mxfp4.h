// Format mxfp4: e2m1, with a power of two for each group of columns.
#pragma once
#include "cpu/codes.h"
#include "cpu/integer_dots.h"
#include "cpu/integer_tiles.h"

namespace moe_metal {

struct Mxfp4 {
  static constexpr bool kOffset = false, kScalesAreRare = false;
  static constexpr int kBits = 4;
  static constexpr float kUnit = 1, kMiddle = 0;
  using Dots = IntegerDots<Integers<4, true>>;
  using Tiles = IntegerTiles<Integers<4, true>>;
  Codes<4> codes{kE2m1};
  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count) const {
    return codes_at(codes, row, column);
  }
  [[gnu::always_inline]] Vec quick(const uint8_t* row, int64_t column) const {
    return codes.quick(row + column * kBits / 8);
  }
};

}  // namespace moe_metal
