// The rows of a packed weight as matrices, with their scales.
#pragma once
#include <bit>

#include "cpu/weights/packed_matrix.h"
#include "cpu/weights/scales.h"
#include "cpu/weights/weight_rows.h"

namespace moe_metal {
namespace {

// A view of some rows of a weight at a time.
template <class Read>
class PackedView {
 public:
  explicit PackedView(const Weight& weight) : weight_(weight), scales_(weight) {
    matrix_.columns = weight.columns;
    matrix_.row = weight.row;
    matrix_.shift = std::countr_zero(static_cast<uint64_t>(weight.group));
    matrix_.groups = scales_.groups();
    // Scales within the blocks are read for several rows at once, before their codes.
    if (Read::kOwnScales) matrix_.distance = rows_at_once() * weight.row;
  }

  // Rows skip to skip + count of a range, valid until the next call. The caller reads the other rows, then `next`,
  // later: they are prefetched.
  const PackedMatrix<Read>& bind_rows(const RowRange& rows, int64_t skip, int64_t count, const uint8_t* next) {
    without_scales(rows, skip, count, next);
    return with_scales(rows, skip);
  }
  // The same in two steps; scales are only read by the second.
  const PackedMatrix<Read>& without_scales(const RowRange& rows, int64_t skip, int64_t count, const uint8_t* next) {
    matrix_.rows = count;
    matrix_.data = address(rows.expert, rows.first + skip);
    matrix_.left = rows.count - skip;
    matrix_.next = next;
    return matrix_;
  }
  const PackedMatrix<Read>& with_scales(const RowRange& rows, int64_t skip) {
    scales_.read(rows.expert, rows.first + skip, matrix_);
    return matrix_;
  }
  // Prefetches the scales of `next`. -> the address of these rows, or of the following rows if `next` is empty
  const uint8_t* prefetched(const RowRange& rows, const RowRange& next) const {
    if (next.count == 0) return address(rows.expert, rows.first + rows.count);
    scales_.prefetch(next.expert, next.first, next.count);
    return address(next.expert, next.first);
  }
  static constexpr int64_t kMaxRowsAtOnce = 16;
  // As many rows as have scales that fit in the L1 cache; a multiple of the rows that are multiplied together.
  int64_t rows_at_once() const {
    const int64_t numbers = scales_.groups() * (Read::kOffset ? 2 : 1);
    return std::clamp<int64_t>(1024 / std::max<int64_t>(numbers, 1), 8, kMaxRowsAtOnce) / 4 * 4;
  }
  const Weight& weight() const { return weight_; }
  const ScaledRows& shape() const { return matrix_; }

 private:
  const uint8_t* address(int64_t expert, int64_t row) const {
    return static_cast<const uint8_t*>(weight_.data.const_data_ptr()) + weight_.row_start(expert, row);
  }

  const Weight& weight_;
  Scales<Read> scales_;
  PackedMatrix<Read> matrix_;
};

}  // namespace
}  // namespace moe_metal
