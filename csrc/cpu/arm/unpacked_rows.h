// Packed rows as floats, a few at a time in the first cache, where products of floats read them. NEON's vectors are too
// short to unpack each alone.
#pragma once
#include "cpu/weights/group_dots.h"

namespace moe_metal {
namespace {

// The codes of 16 columns, in units of Read::kUnit.
template <class Read>
[[gnu::always_inline]] inline void floats_at(const Read& read, const uint8_t* row, int64_t column, Sixteen& to) {
  if constexpr (Read::kOwnScales) {
    read.floats(row, column, to);
  } else {
    read.codes.floats(row + Packed<Read>::bytes(column), to);
  }
}

// Fewer than 16, where formats may have them: those of a byte each.
template <class Read>
inline void last_floats_at(const Read& read, const uint8_t* row, int64_t column, int64_t count, Sixteen& to) {
  uint8_t some[kSixteen] = {};
  std::memcpy(some, row + column, count);
  floats_at(read, some, 0, to);
}

template <class Read>
[[gnu::always_inline]] inline Vec scaled(const Vec& code, const Vec& scale, const Vec& offset) {
  if constexpr (Read::kOffset) return at::vec::fmadd(code, scale, offset);
  if constexpr (Read::kUnit != 1) return code * Vec(Read::kUnit) * scale;
  return code * scale;
}

// The numbers of row `r`.
template <class Read>
inline void unpack(const Packed<Read>& rows, int64_t r, float* to) {
  const uint8_t *row = rows.data + r * rows.row, *next = rows.ahead(r + 8);
  const float *scales = rows.scales + r * rows.groups, *offsets = rows.offsets + r * rows.groups;
  const int64_t group = int64_t{1} << rows.shift;
  for (int64_t first = 0; first < rows.columns; first += group, ++scales, ++offsets) {
    const Vec scale(*scales), offset(Read::kOffset ? *offsets : 0);
    const int64_t end = std::min(first + group, rows.columns);
    int64_t column = first;
    if (next) __builtin_prefetch(next + Packed<Read>::bytes(first));
    for (; column + kSixteen <= end; column += kSixteen) {
      Sixteen codes;
      floats_at(rows.read, row, column, codes);
      unrolled<4>([&](auto v) { store(to + column + v * kLanes, scaled<Read>(codes[v], scale, offset), Whole()); });
    }
    if constexpr (Packed<Read>::bytes(1) == 1) {
      if (column == end) continue;
      Sixteen codes;
      last_floats_at(rows.read, row, column, end - column, codes);
      float some[kSixteen];
      unrolled<4>([&](auto v) { store(some + v * kLanes, scaled<Read>(codes[v], scale, offset), Whole()); });
      std::copy_n(some, end - column, to + column);
    }
  }
}

template <class Read>
class UnpackedRows {
 public:
  void product(const Packed<Read>& rows, const Tokens& tokens, std::optional<Panel>& panel) {
    constexpr int64_t kAtOnce = 8;  // as a panel has, too
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

 private:
  std::unique_ptr<float[], Free> floats_;
  int64_t columns_ = 0;
  std::vector<float*> out_;
};

}  // namespace
}  // namespace moe_metal
