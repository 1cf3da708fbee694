// Rows of a weight in any format and their products, behind one interface. experts, linear and dequantize use it, so
// that they need not be compiled for each format.
#pragma once
#include <memory>
#include <optional>

#include "cpu/vector/dots.h"
#include "weight.h"

namespace moe_metal {

struct TokenTiles;
struct WeightTiles;

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

// Every `step`th row of one expert from `first` on: up to 16 rows, or none.
struct StripRows {
  int64_t expert = 0, first = 0, step = 1, count = 0;
  int64_t span() const { return (count - 1) * step + 1; }
};

// Converts a strip of packed rows to tiles of bfloat16, whose layout is described in x86/tiles.h. Each thread has its
// own.
class PackedStrip {
 public:
  virtual ~PackedStrip() = default;
  // Sets the strip for pack(), and the one after it, which is prefetched meanwhile.
  virtual void start(const StripRows& strip, const StripRows& next) = 0;
  // Converts some columns, to the layout of pack_rows(): whole groups of columns, or part of one.
  virtual void pack(int64_t first, int64_t columns, at::BFloat16* to) = 0;
  // Multiplies two groups of tokens, or two and a half, by the strip, which is converted to `to` meanwhile. The last
  // blocks of the strip stay there, or all without a ring. -> false if the strip does not allow that; nothing is done
  // then.
  virtual bool multiply(const WeightTiles& to, const TokenTiles& groups, float (*c)[16][16]) = 0;
};

// Returns null for dense weights, which are read in place.
std::unique_ptr<PackedStrip> strip_of(const Weight& weight);

// For one format's reader, which MOE_METAL_ROWS_OF compiles in one of formats/*_rows.cpp.
template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16);
template <class Read>
std::unique_ptr<PackedStrip> packed_strip(const Weight& weight);
template <class Read>
std::unique_ptr<PreparedTokens> tokens_for_rows(const Weight& weight, const Tensor& x);

}  // namespace moe_metal
