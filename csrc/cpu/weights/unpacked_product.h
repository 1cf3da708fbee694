// Unpacks a few packed rows at a time to floats in cache, for the products of floats. The tokens share the work,
// and no product is compiled for each format.
#pragma once
#include "cpu/weights/packed_matrix.h"

namespace moe_metal {
namespace {

template <class Read>
class UnpackedProduct {
 public:
  void product(const PackedMatrix<Read>& rows, const Tokens& tokens, std::optional<Panel>& panel) {
    const int64_t columns = rows.columns;
    if (!floats_ || columns_ < columns) floats_ = scratch<float>(kAtOnce * columns), columns_ = columns;
    out_.resize(tokens.count);
    for (int64_t first = 0; first < rows.rows; first += kAtOnce) {
      const int64_t count = std::min(kAtOnce, rows.rows - first);
      for (int64_t r = 0; r < count; ++r) unpack(rows, first + r, &floats_[r * columns]);
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      moe_metal::product(Matrix<float>{floats_.get(), columns, 1, count, columns},
                         {tokens.x, out_.data(), tokens.count}, panel);
    }
  }

  // Writes the values of row `r` to `to`.
  static void unpack(const PackedMatrix<Read>& rows, int64_t r, float* to) {
    const uint8_t* row = rows.data + r * rows.row;
    const float *scales = rows.scales + r * rows.groups, *offsets = rows.offsets + r * rows.groups;
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t first = 0; first < rows.columns; first += group, ++scales, ++offsets) {
      const Vec scale(*scales), offset(Read::kOffset ? *offsets : 0);
      const int64_t end = std::min(first + group, rows.columns);
      int64_t column = first;
      for (; column + kSixteen <= end; column += kSixteen) {
        Sixteen numbers;
        Read::floats(row, column, numbers);
        rows.scaled(numbers, scale, offset);
        store_sixteen(numbers, to + column);
      }
      if (column < end) last_of_a_row(row + column, end - column, scale, to + column);
    }
  }

 private:
  [[gnu::always_inline]] static void store_sixteen(const Sixteen& values, float* to) {
    unrolled<kSixteen / kLanes>([&](auto v) { store(to + v * kLanes, values[v], Whole()); });
  }
  // Fewer than 16 columns. They only occur in formats with one byte per number.
  static void last_of_a_row(const uint8_t* from, int64_t count, const Vec& scale, float* to) {
    uint8_t bytes[kSixteen] = {};
    std::memcpy(bytes, from, count);
    Sixteen numbers;
    Read::floats(bytes, 0, numbers);
    float values[kSixteen];
    PackedMatrix<Read>::scaled(numbers, scale, Vec(0));
    store_sixteen(numbers, values);
    std::copy_n(values, count, to);
  }

  // Whole panels, which write all their rows, or as many rows as are multiplied together and stay in the first cache.
  static constexpr int64_t kAtOnce = kUnpacksInRegisters ? 4 : Panel::kPanelRows;
  std::unique_ptr<float[], Free> floats_;
  int64_t columns_ = 0;
  std::vector<float*> out_;
};

}  // namespace
}  // namespace moe_metal
