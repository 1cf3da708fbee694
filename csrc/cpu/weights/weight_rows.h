// Rows of a weight in any format and their products, behind one interface: experts, linear and dequantize share them,
// and none of them is compiled once per format.
#pragma once
#include <memory>
#include <optional>

#include "cpu/vector/dots.h"
#include "weight.h"

namespace moe_metal {

// Rows of one expert, and perhaps none.
struct RowRange {
  int64_t expert = 0, first = 0, count = 0;
};

// One for each thread.
class WeightRows {
 public:
  virtual ~WeightRows() = default;
  // The products of these rows. `next` are read after them, and come to the caches meanwhile.
  virtual void product(const RowRange& rows, const RowRange& next, const Tokens& tokens,
                       std::optional<Panel>& panel) = 0;
  // One row as floats.
  virtual void dequantize(int64_t expert, int64_t row, float* to) = 0;
};

// bfloat16: the tokens' numbers are bfloat16, or may be rounded to it.
std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16 = false);

// Rows of one expert, every `step`th from `first` on: up to 16, and perhaps none.
struct StripRows {
  int64_t expert = 0, first = 0, step = 1, count = 0;
  int64_t span() const { return (count - 1) * step + 1; }
};

// A strip of packed rows that becomes tiles of bfloat16: x86/tiles.h says how those lie. One for each thread.
class PackedStrip {
 public:
  virtual ~PackedStrip() = default;
  // The strip that pack() is about, and what it works on next: that comes to the caches meanwhile.
  virtual void start(const StripRows& strip, const StripRows& next) = 0;
  // Some columns of some of its 16 rows, as pack_rows() has it: whole groups of columns, or some of one.
  virtual void pack(int64_t row, int64_t rows, int64_t first, int64_t columns, at::BFloat16* to) = 0;
};

// None for dense weights, which are read as they lie.
std::unique_ptr<PackedStrip> strip_of(const Weight& weight);

// Those of one format's reader, which MOE_METAL_ROWS_OF compiles in one of formats/*_rows.cpp.
template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16);
template <class Read>
std::unique_ptr<PackedStrip> packed_strip(const Weight& weight);

}  // namespace moe_metal
