// fp8 and mxfp8: e4m3 with a scale per block of 128 x 128, or an e8m0 scale per 32 columns.
#pragma once
#include "formats/codes.h"

namespace moe_metal {

// The bits of e4m3 are used as those of a half, which scales the value by 2^-8. x is scaled by 2^-8, too. The codes 127
// and 255 are NaN; without a check they would become 480.
template <uint Columns, bool is_mxfp8>
struct E4m3 {
  using Layout = PlainLayout<Columns, 8>;
  enum : uint {
    columns = Columns,
    words = columns / 4,
    groups = 1,
    distance = kNarrowColumns,
    scale_rows = is_mxfp8 ? 1 : 128,
    own_scales = 0,
    e8m0_scale = is_mxfp8,
    e4m3_scale = 0,
    has_offset = 0,
    factor = 1 << 16,
    middle = 0,
    zero = 0
  };
  static constexpr uint exponent(uint) { return 8; }
  template <bool, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const uint word = words.at[i / 4 + n / 2], top = n % 2 ? word : word << 8;  // bytes n % 2 and n % 2 + 2
      const half2 pair = as_type<half2>((top & 0x80008000u) | (top >> 1 & 0x3f803f80u));
      codes.at[n / 2][n % 2] = float(pair.x);
      codes.at[n / 2][n % 2 + 2] = float(pair.y);
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>& words, uint i) {
    return (words.at[i / 4] >> (i % 4 * 8) & 0x7f) == 0x7f;
  }
  static uint nan_bits(uint word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }
};

namespace formats {
template <uint columns>
using fp8 = E4m3<columns, false>;
template <uint columns>
using mxfp8 = E4m3<columns, true>;
}  // namespace formats

}  // namespace moe_metal
