// affine: integers of 2, 3, 4, 5, 6 or 8 bits, with a scale and an offset per group of columns.
#pragma once
#include "formats/codes.h"

namespace moe_metal {

template <uint Columns, uint Bits>
struct Affine {
  using Layout = PlainLayout<Columns, Bits>;
  enum : uint {
    columns = Columns,
    bits = Bits,
    words = (columns * bits + 31) / 32,
    groups = 1,
    distance = kNarrowColumns,
    scale_rows = 1,
    own_scales = 0,
    e8m0_scale = 0,
    e4m3_scale = 0,
    has_offset = 1,
    halves = 32 % Bits == 0,
    factor = halves ? 1 << 24 : 1 << 12,
    middle = 1 << (Bits - 1),
    zero = 0
  };

  static constexpr uint bit(uint i) { return i * bits % 32; }
  static constexpr uint exponent(uint i) { return halves ? bit(i) % 8 : 0; }

  // For widths that divide 32: code i and the one 16 bits higher stay at their bit positions and are used as subnormal
  // halves, where the lowest bit is 2^-24. x, which all rows share, is scaled down to compensate for the positions.
  static half2 pair(uint word, uint i) {
    const uint mask = ((1u << bits) - 1) << exponent(i);
    return as_type<half2>((bit(i) % 16 < 8 ? word : word >> 8) & (mask | mask << 16));
  }
  // For any width: puts a code, which may span two words, in the lowest bits of the float 2^11, where 1 is 2^-12.
  template <bool centred, uint N>
  static float single(thread const Words<N>& words, uint i) {
    const uint word = i * bits / 32;
    uint code = words.at[word] >> bit(i);
    if (bit(i) + bits > 32) code |= words.at[word + 1] << (32 - bit(i));
    return as_type<float>((code & ((1u << bits) - 1)) | 0x45000000u) -
           (2048 + (centred ? float(middle) / float(factor) : 0));
  }
  template <bool centred>
  static float number(half code, uint i) {
    return centred ? float(code) - float(middle) / float(factor) * float(1u << exponent(i)) : float(code);
  }

  template <bool centred, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
    constexpr uint partner = 16 / bits;
#pragma unroll
    for (uint n = 0; n < 8; ++n) {
      if (!halves) {
        codes.at[n / 4][n % 4] = single<centred>(words, i + n);
      } else if (bit(i + n) < 16 || partner >= 8) {
        const half2 both = pair(words.at[(i + n) * bits / 32], i + n);
        codes.at[n / 4][n % 4] = number<centred>(bit(i + n) < 16 ? both.x : both.y, i + n);
        const uint m = (n + partner) % 8;
        if (partner < 8) codes.at[m / 4][m % 4] = number<centred>(both.y, i + n);
      }
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
using affine2 = Affine<columns, 2>;
template <uint columns>
using affine3 = Affine<columns, 3>;
template <uint columns>
using affine4 = Affine<columns, 4>;
template <uint columns>
using affine5 = Affine<columns, 5>;
template <uint columns>
using affine6 = Affine<columns, 6>;
template <uint columns>
using affine8 = Affine<columns, 8>;
}  // namespace formats

}  // namespace moe_metal
