// Packed rows, with their scales, as vectors of float.
#pragma once
#include "cpu/weights/scaled_rows.h"

namespace moe_metal {
namespace {  // internal linkage, so that the compiler can specialise functions for their calls

// The counterpart of Matrix for packed rows.
template <class Read>
struct PackedMatrix : ScaledRows {
  static constexpr int kAtOnce = Read::kAtOnce;

  // The columns of load_permuted() are of one group or, with AVX2 and the groups of 16 columns in GGML's blocks, of
  // two, each of which has half of the lanes. kSpan is how many groups they are.
  static constexpr int kSpan = Read::kGroup == 0 ? 1 : std::max<int>(kAtOnce * kLanes / Read::kGroup, 1);
  // The scales (or offsets) of the lanes of a span.
  [[gnu::always_inline]] static Vec of_span(const float* from) {
    constexpr int kUpperHalf = (1 << kLanes) - (1 << kLanes / 2);
    if constexpr (kSpan == 2) return Vec::template blend<kUpperHalf>(Vec(from[0]), Vec(from[1]));
    return Vec(*from);
  }

  struct RowBlock {
    const PackedMatrix& all;
    const uint8_t* data;
    const float *scales, *offsets;
    template <class Count>
    [[gnu::always_inline]] Vec load(int64_t r, int64_t column, Count count) const {
      const int64_t group = r * all.groups + (column >> all.shift);
      const Vec codes = Read::vector(data + r * all.row, column, count), scale(scales[group]);
      const Vec values = Read::kOffset ? at::vec::fmadd(codes, scale, Vec(offsets[group])) : codes * scale;
      if constexpr (std::is_same_v<Count, Whole>) return values;
      return Vec::set(Vec(0), values, count);
    }
    // The values of 16 columns, which have one scale.
    [[gnu::always_inline]] void sixteen(int64_t r, int64_t column, Sixteen& to) const {
      Read::floats(data + r * all.row, column, to);
      const int64_t group = r * all.groups + (column >> all.shift);
      scaled(to, Vec(scales[group]), Vec(Read::kOffset ? offsets[group] : 0));
    }
    // See Matrix::RowBlock. Each half of the columns must have one scale.
    int64_t transposed_columns() const {
      return int64_t{2} << all.shift >= Read::kTransposedColumns ? Read::kTransposedColumns : 0;
    }
    template <class Use>
    void transposed(int64_t column, Use&& use) const
      requires requires { Read::transposed(data, all.row, column, use); }
    {
      constexpr int64_t half = Read::kTransposedColumns / 2;
      const bool same = column >> all.shift == (column + half) >> all.shift;
      const auto rows = Words::arange(0, static_cast<int32_t>(all.groups));
      const auto read = [&](const float* from, Vec(&of_halves)[2]) {
        of_halves[0] = at::vec::gather<4>(from + (column >> all.shift), rows);
        of_halves[1] = same ? of_halves[0] : at::vec::gather<4>(from + ((column + half) >> all.shift), rows);
      };
      Vec scale[2], offset[2];
      read(scales, scale);
      if constexpr (Read::kOffset) read(offsets, offset);
      Read::transposed(data, all.row, column, [&](int64_t i, const Vec& codes) {
        const bool second = i >= half;
        if constexpr (Read::kOffset)
          use(i, at::vec::fmadd(codes, scale[second], offset[second]));
        else
          use(i, (codes - Vec(Read::kMiddle)) * scale[second]);
      });
    }
    // Packed rows are too short for the hardware prefetcher.
    [[gnu::always_inline]] void prefetch(int64_t r, int64_t column) const {
      __builtin_prefetch(data + r * all.row + bytes(column), 0, 2);
    }
  };
  RowBlock row_block(int64_t first) const {
    return {*this, data + first * row, scales + first * groups, offsets + first * groups};
  }
  const void* address(int64_t r, int64_t column) const { return data + r * row + bytes(column); }
  int64_t row_bytes() const { return row; }
  static constexpr int64_t bytes(int64_t columns) { return columns * Read::kBytes / Read::kColumns; }

  // The values of 16 codes.
  [[gnu::always_inline]] static void scaled(Sixteen& codes, const Vec& scale, const Vec& offset) {
    for (Vec& code : codes) {
      if constexpr (Read::kUnit != 1) code = code * Vec(Read::kUnit);
      code = Read::kOffset ? at::vec::fmadd(code, scale, offset) : code * scale;
    }
  }
};

}  // namespace
}  // namespace moe_metal
