// Shared by the readers of GGML's blocks. A block is a struct with these members:
//
//   kColumns, kBytes    the size of a block
//   kGroup              neighbouring columns that share a scale
//   kMiddle             the middle of the codes: a value is scale * (code - kMiddle)
//   kOffset             whether the format has offsets instead: a value is scale * code + offset
//   codes()             16 codes of a block, from a column on, as unsigned bytes. If neighbours of 32 columns are
//   stored
//                       together, it is a template, which can also give 32
//   scales()            the scale of each group of several blocks, and the offset if kOffset
#pragma once
#include "cpu/arm/integer_dots.h"
#include "cpu/vector/bytes.h"

namespace moe_metal {

inline float half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return static_cast<float>(at::Half(bits, at::Half::from_bits()));
}

// Converts float16 numbers that are `step` bytes apart. They are gathered first, since a vector is converted in the
// time of one number.
inline void halves(const uint8_t* from, int64_t step, int64_t count, float* to) {
  constexpr int64_t kAtOnce = 64;
  alignas(64) at::Half gathered[kAtOnce];
  for (; count > 0; count -= kAtOnce, to += kAtOnce) {
    const int64_t now = std::min(count, kAtOnce);
    for (int64_t i = 0; i < now; ++i, from += step) std::memcpy(&gathered[i], from, sizeof(at::Half));
    for_each_vector(now, [&](int64_t i, auto n) { store(to + i, load(gathered + i, n), n); });
  }
}

// The reader of a block's format; weights/packed_rows.h describes readers.
template <class Block>
struct Blocks {
  static constexpr bool kOffset = Block::kOffset, kOwnScales = true;
  static constexpr int kColumns = Block::kColumns, kBytes = Block::kBytes, kGroup = Block::kGroup;
  static constexpr int kAtOnce = 32 / kLanes;
  // Whether 32 columns of bytes are a vector of words, which load_permuted() and transposed() shift: that takes less
  // time than the shuffles that widen neighbouring bytes.
  static constexpr bool kShiftsWords = kLanes == 8;
  // load_permuted() centres the codes of formats without offsets, except where plain codes take less time.
  static constexpr float kUnit = 1, kMiddle = kOffset || kShiftsWords ? Block::kMiddle : 0;
  using Dots = arm::IntegerDots<Block>;

  [[gnu::always_inline]] static void floats(const uint8_t* row, int64_t column, Sixteen& to) {
    const Bytes codes = Block::codes(row + column / kColumns * kBytes, column % kColumns);
    signed_floats(codes - static_cast<uint8_t>(kOffset ? 0 : Block::kMiddle), to);
  }
  template <class Count>
  [[gnu::always_inline]] static Vec vector(const uint8_t* row, int64_t column, Count) {
    Sixteen numbers;
    floats(row, column / kSixteen * kSixteen, numbers);
    return numbers[column % kSixteen / kLanes];
  }
  [[gnu::always_inline]] static void load_permuted(const uint8_t* row, int64_t column, Vec (&to)[kAtOnce]) {
    if constexpr (kShiftsWords) {
      each_byte(words_of_32(row, column), [&](int i, const Vec& codes) { to[i] = codes; });
    } else {
      unrolled<kAtOnce>([&](auto v) { to[v] = vector(row, column + v * kLanes, Whole()); });
    }
  }
  static void permute_like_load([[maybe_unused]] Vec (&x)[kAtOnce]) {
    if constexpr (kShiftsWords) {  // each fourth number
      const auto [first, second] = at::vec::deinterleave2(x[0], x[1]);
      const auto [third, fourth] = at::vec::deinterleave2(x[2], x[3]);
      std::tie(x[0], x[2]) = at::vec::deinterleave2(first, third);
      std::tie(x[1], x[3]) = at::vec::deinterleave2(second, fourth);
    }
  }
  // Codes are transposed as bytes.
  static constexpr int64_t kTransposedColumns = 32;
  template <class Use>
  static void transposed(const uint8_t* rows, int64_t step, int64_t column, Use&& use)
    requires kShiftsWords
  {
    Vec codes[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) codes[r] = at::vec::cast<float>(words_of_32(rows + r * step, column));
    transpose(codes);
    MOE_METAL_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      each_byte(at::vec::cast<int32_t>(codes[i]), [&](int j, const Vec& of_rows) { use(4 * i + j, of_rows); });
    }
  }

  static void scales(const uint8_t* row, int64_t columns, float* scale, float* offset) {
    Block::scales(row, columns / kColumns, scale, offset);
  }

 private:
  [[gnu::always_inline]] static Words words_of_32(const uint8_t* row, int64_t column) {
    if (column % 32 != 0) __builtin_unreachable();  // for simpler addresses
    const uint8_t* block = row + column / kColumns * kBytes;
    const int64_t at = column % kColumns;
    if constexpr (requires { Block::template codes<Bytes32>(block, at); }) {
      return std::bit_cast<Words>(Block::template codes<Bytes32>(block, at));
    } else {
      return std::bit_cast<Words>(std::array{Block::codes(block, at), Block::codes(block, at + 16)});
    }
  }
  // Calls use(i, floats) for each of the four bytes of words.
  template <class Use>
  [[gnu::always_inline]] static void each_byte(const Words& words, Use&& use) {
    const Words lowest(255);
    unrolled<4>([&](auto i) { use(i, at::vec::convert<float>((i ? words >> Words(8 * i) : words) & lowest)); });
  }
};

}  // namespace moe_metal
