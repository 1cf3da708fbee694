// Rows of a weight in any format and their products, behind one interface. experts, linear and dequantize use it, so
// that they need not be compiled for each format.
#pragma once
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>

#include "cpu/vector/dots.h"
#include "weight.h"

namespace moe_metal {

// A range of rows of one expert, which may be empty.
struct RowRange {
  int64_t expert = 0, first = 0, count = 0;
};

// Each thread has its own.
class WeightRows {
 public:
  virtual ~WeightRows() = default;
  // Multiplies these rows by the tokens, and prefetches `next`, the rows to be read after them.
  virtual void product(const RowRange& rows, const RowRange& next, const Tokens& tokens,
                       std::optional<Panel>& panel) = 0;
  // One row as floats.
  virtual void dequantize(int64_t expert, int64_t row, float* to) = 0;
};

// bfloat16: the tokens are bfloat16, or may be rounded to it.
std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16 = false);

// Tokens for products with many of them: rows of x, which are bfloat16 or may be rounded to it, and must not change.
// Returns null if that is not faster on this processor, or not in this format.
std::unique_ptr<PreparedTokens> prepare_tokens(const Weight& weight, const Tensor& x);

// Rows of packed weights, which have another product for results that are not finite.
class PackedProducts : public WeightRows {
 public:
  // The product without other ways: each number is scaled before it is multiplied.
  virtual void scaled_first(const RowRange& rows, const Tokens& tokens) = 0;
};

// The rows in one format, for its reader. MOE_METAL_ROWS_OF compiles it in one of formats/*_rows.cpp.
template <class Read>
std::unique_ptr<PackedProducts> packed_rows(const Weight& weight, bool bfloat16);

// Whether a table has a row for each format, in the order of kFormats.
template <class Row, size_t N>
constexpr bool in_order_of_formats(const Row (&rows)[N]) {
  const auto is_same = [](const Row& row, const Format& format) { return row.format == format.library; };
  return std::equal(std::begin(rows), std::end(rows), std::begin(kFormats), std::end(kFormats), is_same);
}

}  // namespace moe_metal
