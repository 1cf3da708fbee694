// Tile rows of packed weights for the products of x86/tiles.h, behind one interface for all formats.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "weight.h"

namespace moe_metal {

struct TokenTiles;
struct WeightTiles;

// Every `step`th row of one expert from `first` on: up to 16 rows, or none.
struct TileRowRange {
  int64_t expert = 0, first = 0, step = 1, count = 0;
  int64_t span() const { return (count - 1) * step + 1; }
};

// A tile row of a packed weight as bfloat16, whose layout is described in x86/tiles.h. Each thread has its own.
class PackedTileRow {
 public:
  virtual ~PackedTileRow() = default;
  // Sets the tile row for pack(), and the one after it, which is prefetched meanwhile.
  virtual void start(const TileRowRange& tile_row, const TileRowRange& next) = 0;
  // Converts some columns, to the layout of pack_rows(): whole groups of columns, or part of one.
  virtual void pack(int64_t first, int64_t columns, at::BFloat16* to) = 0;
  // Converts the tile row into `to` and multiplies it by 2 or 2.5 tiles of tokens in the same pass. `to` keeps the
  // last chunks, or all if it is no ring. -> false if the tile row does not allow that; nothing is done then
  virtual bool multiply(const WeightTiles& to, const TokenTiles& tokens, float (*c)[16][16]) = 0;
};

// For a packed weight.
std::unique_ptr<PackedTileRow> tile_row_of(const Weight& weight);

}  // namespace moe_metal
