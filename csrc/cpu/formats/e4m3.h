// Formats fp8 and mxfp8: e4m3 with a scale per block of rows and columns, or per group of columns.
#pragma once
#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

template <bool scales_are_rare>
struct E4m3Codes : InARow<E4m3, 1, 1> {
  static constexpr bool kOffset = false, kScalesAreRare = scales_are_rare, kOwnScales = false;
  static constexpr float kUnit = E4m3::kUnit, kMiddle = 0;
  static constexpr int kGroup = scales_are_rare ? 128 : 32;
  using Dots = E4m3Dots<kGroup>;
  using Tiles = NoDots;
  using Panels = NoDots;
#ifdef MOE_METAL_HAS_AVX512
  // Four columns are transposed before they are converted.
  static int64_t transposed_columns() { return vbmi_available() ? 64 : 0; }
  template <class Use>
  [[MOE_METAL_BF16, gnu::noinline]] void transposed(const uint8_t* rows, int64_t step, int64_t column,
                                                    Use&& use) const {
    // In each 16 bytes: columns 0 and 1 of four rows, then columns 2 and 3.
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    __m512i tile[16];
    for (int64_t r = 0; r < 16; ++r) tile[r] = _mm512_loadu_si512(rows + r * step + column);
    transpose(tile);
    for (int64_t i = 0; i < 16; ++i) {
      __m512i numbers[EightBits::kVectors], floats[Floats::kVectors];
      numbers_(_mm512_shuffle_epi8(tile[i], pairs), numbers);
      Floats::convert(numbers, floats);
      for (int64_t c = 0; c < 4; ++c) use(4 * i + c, Vec(_mm512_castsi512_ps(floats[c])));
    }
  }

 private:
  EightBits numbers_;
#endif
};
using E4m3Blocks = E4m3Codes<true>;
using E4m3Groups = E4m3Codes<false>;

}  // namespace moe_metal
