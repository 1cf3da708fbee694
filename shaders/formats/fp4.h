// mxfp4 and nvfp4: e2m1 with an e8m0 scale per 32 columns, or an e4m3 scale per 16.
#pragma once
#include "formats/codes.h"

namespace moe_metal {

// The bits of e2m1 are used as those of a half, which scales the value by 2^-14; 0.5 becomes a subnormal half. In the
// upper byte of the half, the sign keeps its bit and the magnitude is three bits lower. This is done for four codes
// at once, in the upper or the lower four bits of a word's bytes. Shifts are expensive on Apple's GPUs, but shifts by
// up to 4 are free in an addition.
inline uint e2m1_upper(uint word) { return (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu); }
inline uint e2m1_lower(uint word) { return ((word & 0x08080808u) << 4) + ((word & 0x07070707u) << 1); }
// The codes in bytes 1 and 3.
inline half2 e2m1_pair(uint bytes) { return as_type<half2>(bytes & 0xff00ff00u); }

template <uint Columns, bool is_nvfp4>
struct E2m1 {
  using Layout = PlainLayout<Columns, 4>;
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
  static constexpr uint exponent(uint) { return 0; }
  template <bool, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
    const uint lower = e2m1_lower(words.at[i / 8]), upper = e2m1_upper(words.at[i / 8]);
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const uint bytes = n % 2 ? upper : lower;
      const half2 pair = e2m1_pair(n < 2 ? bytes << 8 : bytes);  // codes n and n + 4
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
