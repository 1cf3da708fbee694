// Rows of a weight in any format and their products, behind one face: experts, linear and dequantize share them, and
// none of them is compiled once per format.
#pragma once
#include <memory>
#include <optional>

#include "dots.h"
#include "tiles.h"
#include "weight.h"

namespace moe_metal {

// Rows of one expert, every `step`th from `first` on: up to 16, and perhaps none.
struct StripRows {
  int64_t expert = 0, first = 0, step = 1, count = 0;
  int64_t span() const { return (count - 1) * step + 1; }
};

// One for each thread.
class WeightRows {
 public:
  virtual ~WeightRows() = default;
  // Those that the next calls are about: `count` rows of one expert from `first` on.
  virtual void take(int64_t expert, int64_t first, int64_t count) = 0;
  // What comes after them, and is brought to the caches towards their end.
  virtual void next(int64_t, int64_t, int64_t) {}
  virtual void product(const Tokens& tokens, std::optional<Panel>& panel) = 0;
  // One of the rows, as floats.
  virtual void dequantize(int64_t row, float* to) = 0;
#ifdef MOE_METAL_AMX
  // Instead of take(), for pack(). What pack() works on next comes to the caches meanwhile.
  virtual void take_strip(const StripRows&, const StripRows&) { TORCH_INTERNAL_ASSERT(false); }
  // Some columns of some of the strip's 16 rows, as tiles.h's pack_rows() has it: whole groups of columns, or some of
  // one. Dense weights are read as they lie.
  virtual void pack(int64_t, int64_t, int64_t, int64_t, at::BFloat16*) { TORCH_INTERNAL_ASSERT(false); }
#endif
};

// bfloat16: the tokens' numbers are bfloat16, or may be rounded to it.
std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16 = false);

// Those of one format's reader; each is compiled in one of packed_rows_*.cpp.
template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16);

}  // namespace moe_metal
