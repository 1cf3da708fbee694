// Rows of a weight in any format and their products, behind one face: experts, linear and dequantize share them, and
// none of them is compiled once per format.
#pragma once
#include <memory>
#include <optional>

#include "dots.h"
#include "tiles.h"
#include "weight.h"

namespace moe_metal {

// One for each thread.
class WeightRows {
 public:
  virtual ~WeightRows() = default;
  // Those that the next calls are about: `count` rows of one expert from `first` on.
  virtual void take(int64_t expert, int64_t first, int64_t count) = 0;
  // Those come next: what a product reads before its own prefetching has begun to work is brought to the caches.
  virtual void prefetch(int64_t, int64_t, int64_t) const {}
  virtual void product(const Tokens& tokens, std::optional<Panel>& panel) const = 0;
  // One of the rows, as floats.
  virtual void dequantize(int64_t row, float* to) const = 0;
#ifdef MOE_METAL_AMX
  // Some columns of every `step`th row, up to 16 of them, as tiles.h's pack_rows() has it: whole groups of them,
  // or some of one. Dense weights are read as they lie.
  virtual void pack(int64_t, int64_t, int64_t, int64_t, at::BFloat16*) const { TORCH_INTERNAL_ASSERT(false); }
#endif
};

// bfloat16: the tokens' numbers are bfloat16, or may be rounded to it.
std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16 = false);

}  // namespace moe_metal
