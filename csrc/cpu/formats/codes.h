// Readers of consecutive numbers without blocks. A vector begins at a whole byte, and no byte is read beyond that of
// its last number.
//
// A product may have its columns in any order that both factors have: permute_like_load(x) puts two vectors in the
// order of load_permuted(from), which loads two vectors of numbers.
#pragma once
#include <tuple>

#include "cpu/vector/bytes.h"

namespace moe_metal {

// Integers of `bits` bits, or e2m1.
template <int bits, bool is_e2m1 = false>
struct Codes {
  [[gnu::always_inline]] static void floats(const uint8_t* from, Sixteen& to) { code_floats<bits, is_e2m1>(from, to); }
  template <class Count>
  [[gnu::always_inline]] static Vec vector(const uint8_t* from, Count) {
    return values(spread_words<bits>(from));
  }
  // With 4 bits, the even numbers, then the odd ones.
  [[gnu::always_inline]] static void load_permuted(const uint8_t* from, Vec (&to)[2]) {
    if constexpr (bits == 4) {
      const Words both = bytes_as_words(from);
      const Words odd = both >> Words(4);
      to[0] = values(both), to[1] = is_e2m1 ? values(odd) : at::vec::convert<float>(odd);
    } else {
      to[0] = vector(from, Whole()), to[1] = vector(from + kLanes * bits / 8, Whole());
    }
  }
  [[gnu::always_inline]] static void permute_like_load(Vec (&x)[2]) {
    if constexpr (bits == 4) std::tie(x[0], x[1]) = at::vec::deinterleave2(x[0], x[1]);
  }

  // Words of several columns are transposed before they are unpacked.
  static constexpr int64_t kTransposedColumns = kLanes * (32 / bits);
  template <class Use>
  static void transposed(const uint8_t* rows, int64_t step, Use&& use)
    requires(32 % bits == 0)
  {
    constexpr int64_t kInAWord = 32 / bits;
    Vec words[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) words[r] = Vec::loadu(rows + r * step);
    transpose(words);
    MOE_METAL_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      MOE_METAL_UNROLL for (int64_t j = 0; j < kInAWord; ++j) {
        const Words word = at::vec::cast<int32_t>(words[i]) >> Words(static_cast<int32_t>(j * bits));
        use(i * kInAWord + j, values(word));
      }
    }
  }

 private:
  [[gnu::always_inline]] static Vec values(const Words& words) { return values_of<bits, is_e2m1>(words); }
};

struct E4m3 {
  static constexpr float kUnit = kE4m3Unit;  // a value is kUnit times a number of floats() or load_permuted()
  [[gnu::always_inline]] static void floats(const uint8_t* from, Sixteen& to) { e4m3_floats(from, to); }
  template <class Count>
  [[gnu::always_inline]] static Vec vector(const uint8_t* from, Count count) {
    uint8_t bytes[kSixteen] = {};
    std::memcpy(bytes, from, count);
    Sixteen numbers;
    floats(bytes, numbers);
    return numbers[0] * Vec(kUnit);
  }
  [[gnu::always_inline]] static void load_permuted(const uint8_t* from, Vec (&to)[2]) {
    for (int64_t v = 0; v < 2; v += kSixteen / kLanes) {
      Sixteen numbers;
      floats(from + v * kLanes, numbers);
      std::copy_n(numbers, kSixteen / kLanes, to + v);
    }
  }
  [[gnu::always_inline]] static void permute_like_load(Vec (&)[2]) {}
};

// The base of these readers; weights/packed_rows.h describes readers.
template <class CodesOf, int columns, int bytes>
struct InARow {
  static constexpr int kColumns = columns, kBytes = bytes, kGroup = 0, kUsualGroup = 64, kAtOnce = 2;
  static void floats(const uint8_t* row, int64_t column, Sixteen& to) { CodesOf::floats(at(row, column), to); }
  template <class Count>
  [[gnu::always_inline]] static Vec vector(const uint8_t* row, int64_t column, Count count) {
    return CodesOf::vector(at(row, column), count);
  }
  [[gnu::always_inline]] static void load_permuted(const uint8_t* row, int64_t column, Vec (&to)[2]) {
    CodesOf::load_permuted(at(row, column), to);
  }
  static void permute_like_load(Vec (&x)[2]) { CodesOf::permute_like_load(x); }
  static constexpr int64_t kTransposedColumns = [] {
    if constexpr (requires { CodesOf::kTransposedColumns; }) return CodesOf::kTransposedColumns;
    return int64_t{0};
  }();
  template <class Use>
  static void transposed(const uint8_t* rows, int64_t step, int64_t column, Use&& use)
    requires requires { CodesOf::transposed(rows, step, use); }
  {
    CodesOf::transposed(at(rows, column), step, use);
  }

 private:
  static const uint8_t* at(const uint8_t* row, int64_t column) { return row + column * bytes / columns; }
};

}  // namespace moe_metal
