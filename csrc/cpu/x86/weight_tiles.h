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

// A tile row: the tiles of 16 rows of a weight. Chunk b, of 32 columns, of row r is at data + r * row + (b & ring) *
// chunk. With a ring buffer of chunks, `ring` is its size minus one.
struct WeightTiles {
  const at::BFloat16* data;
  int64_t row, chunk;
  int64_t ring = -1;
};

// Tokens as right operands: tiles of 16 tokens, with stride `size`.
struct TokenTiles {
  const at::BFloat16* data;
  int64_t size, tokens;
  int64_t count() const { return at::divup(tokens, kTile); }
  TokenTiles subrange(int64_t first, int64_t most) const {
    return {data + first * size, size, std::min(tokens - first * kTile, most * kTile)};
  }
};

// For products that are not interleaved with other work.
struct Nothing {
  void operator()(auto...) const {}
};

}  // namespace moe_metal
