// mxfp4 and nvfp4: e2m1, with a scale in e8m0 for each 32 columns, or one in e4m3 for each 16.
#pragma once
#include "formats/codes.h"

namespace moe_metal {

// e2m1 becomes half by its bits: its exponent is 14 smaller there, and 0.5 is a subnormal half. The code in the highest
// bits of each half.
inline half2 e2m1_pair(uint top) { return as_type<half2>((top & 0x80008000u) | (top >> 3 & 0x0e000e00u)); }

template <uint Columns, bool is_nvfp4>
struct E2m1 {
  using Layout = Stream<Columns, 4>;
  enum : uint {
    columns = Columns,
    words = columns / 8,
    groups = is_nvfp4 ? columns / 16 : 1,
    distance = kNarrowColumns,
    scale_rows = 1,
    own_scales = 0,
    e8m0_scale = !is_nvfp4,
    e4m3_scale = is_nvfp4,
    has_offset = 0,
    factor = 1 << 14,
    middle = 0,
    zero = 0
  };
  static constexpr uint place(uint) { return 0; }
  template <bool, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const half2 pair = e2m1_pair(words.at[i / 8] << (12 - 4 * n));  // codes n and n + 4
      codes.at[0][n] = float(pair.x);
      codes.at[1][n] = float(pair.y);
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>&, uint) {
    return false;
  }
  static uint nan_bits(uint) { return 0; }
};

namespace formats {
template <uint columns>
using mxfp4 = E2m1<columns, false>;
template <uint columns>
using nvfp4 = E2m1<columns, true>;
}  // namespace formats

}  // namespace moe_metal
