// Strips of packed rows for the products of x86/tiles.h, behind one interface for all formats.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "weight.h"

namespace moe_metal {

struct TokenGroups;
struct WeightTiles;

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
  // Converts the strip into `to` and multiplies it by 2 or 2.5 groups of tokens in the same pass. `to` keeps the last
  // blocks, or all if it is no ring. -> false if the strip does not allow that; nothing is done then
  virtual bool multiply(const WeightTiles& to, const TokenGroups& groups, float (*c)[16][16]) = 0;
};

// For a packed weight.
std::unique_ptr<PackedStrip> strip_of(const Weight& weight);

}  // namespace moe_metal
