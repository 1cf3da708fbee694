// The readers of GGML's blocks with what AVX-512 adds to them. A block has these members besides those of
// formats/blocks.h:
//
//   kOrder              an order of 128 columns
//   unpack()            the codes of 128 columns in this order
//   unpack_in_place()   some formats: the same, but the codes of odd lanes are times 16, which saves shifts
//   kScalesOfLanes      whether scales_of_lanes() can read the scales of these columns; a lane has four columns
//   factors()           formats with kScalesOfLanes and kOffset: the scales of a block's groups in the even lanes, and
//                       the numbers to subtract in the odd lanes
//   words()             formats with up to 5 bits: the codes of 32 columns as words. Bits above the lowest kBits are
//                       undefined. number() is the value of a code
//   bytes()             other formats: the codes of 32 columns, minus the middle
//   scale_of_block()    blocks of 32 columns: the scale, and the offset if kOffset
#pragma once
#include "cpu/formats/blocks.h"
#include "cpu/x86/bfloat16_dots.h"
#include "cpu/x86/bytes_512.h"
#include "cpu/x86/integer_panels.h"

namespace moe_metal::x86 {

// An order of 128 columns: the first halves of all runs of 32, then the second halves. A lane sums 8 columns, which
// share a scale.
inline constexpr auto kHalvesOf32 = [] {
  std::array<uint8_t, 128> columns{};
  for (int i = 0; i < 128; ++i) columns[i] = static_cast<uint8_t>(i % 64 / 16 * 32 + i / 64 * 16 + i % 16);
  return columns;
}();

template <class Block>
struct Blocks : moe_metal::Blocks<Block> {
  using Base = moe_metal::Blocks<Block>;
  using Base::kColumns, Base::kBytes, Base::kOffset;
  using Portable = moe_metal::Blocks<typename Block::Portable>;
  using Dots = FewDots<Block>;
  using Panels = IntegerPanels<Block>;

  [[gnu::always_inline]] static __m512i words(const uint8_t* row, int64_t column)
    requires requires(const uint8_t* block, int64_t at) { Block::words(block, at); }
  {
    return Block::words(row + column / kColumns * kBytes, column % kColumns);
  }
  // N vectors of centred codes. A block's bytes() has those of two vectors, or of four.
  template <int N>
  [[gnu::always_inline]] static void vectors(const uint8_t* row, int64_t column, Vec (&to)[N])
    requires requires(const uint8_t* block, int64_t at) { requires N * 16 % sizeof(Block::bytes(block, at)) == 0; }
  {
    constexpr int kAtOnce = sizeof(Block::bytes(row, column)) / 16;
    MOE_METAL_UNROLL for (int i = 0; i < N; i += kAtOnce, column += kAtOnce * 16) {
      const auto all = Block::bytes(row + column / kColumns * kBytes, column % kColumns);
      each_sixteen(all, [&](int k, __m128i some) __attribute__((always_inline)) {
        to[i + k] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some));
      });
    }
  }
  [[gnu::always_inline]] static void scale_of_block(const uint8_t* block, float& scale, float& offset)
    requires requires { Block::scale_of_block(block, scale, offset); }
  {
    Block::scale_of_block(block, scale, offset);
  }
  static Vec values(int half) {
    static constexpr auto kValues = [] {
      std::array<float, 32> values{};
      for (int i = 0; i < 32; ++i) {
        values[i] = static_cast<float>(Block::number(i % (1 << Block::kBits)) - (kOffset ? 0 : Block::kMiddle));
      }
      return values;
    }();
    return Vec::loadu(kValues.data() + 16 * half);
  }
};

}  // namespace moe_metal::x86
