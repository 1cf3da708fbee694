// Tiles of 16 x 32 bfloat16 of a weight, for the products of x86/amx_bf16.h and x86/avx512_bf16.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "cpu/vector/vec.h"
#include "cpu/x86/processor.h"

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

// Tokens as right operands: groups of 16, with stride `size`.
struct TokenGroups {
  const at::BFloat16* data;
  int64_t size, tokens;
  int64_t count() const { return at::divup(tokens, kTile); }
  TokenGroups subrange(int64_t group, int64_t most) const {
    return {data + group * size, size, std::min(tokens - group * kTile, most * kTile)};
  }
};

// For products that are not interleaved with other work.
struct Nothing {
  void operator()(auto...) const {}
};

}  // namespace moe_metal
