// Tiles of 16 x 32 bfloat16 of a weight, for the products of x86/amx_bf16.h and x86/avx512_bf16.h.
#pragma once
#include <ATen/core/Tensor.h>

#include "cpu/vector/vec.h"

namespace moe_metal {

constexpr int64_t kTile = 16;   // rows of a weight tile, and tokens of a token tile
constexpr int64_t kDepth = 32;  // bfloat16 of k in a tile
constexpr int64_t kTileSize = kTile * kDepth;
static_assert(kLanes == kTile);

// 16 rows of a weight matrix: block b of row r is at data + r * row + (b & ring) * block. With a ring buffer of blocks,
// `ring` is its size minus one.
struct WeightTiles {
  const at::BFloat16* data;
  int64_t row, block;
  int64_t ring = -1;
};

}  // namespace moe_metal
