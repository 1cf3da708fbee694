// Products of tiles of bfloat16 on processors with AMX.
#pragma once
#include <iterator>

#include "cpu/x86/weight_tiles.h"

namespace moe_metal {

// Configures all eight tiles of this thread as 16 rows of 64 bytes, for the lifetime of this object. Does nothing
// without AMX.
class TileShapes {
 public:
  TileShapes() {
    if (amx_available()) configure();
  }
  ~TileShapes() {
    if (amx_available()) restore();
  }
  TileShapes(const TileShapes&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  // Static, because compilers only know about the first words that the instruction reads, and drop stores to the rest.
  static constexpr Config kOurs = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile}};
  [[MOE_METAL_AMX]] void configure() {
    _tile_storeconfig(&before_);
    _tile_loadconfig(&kOurs);
  }
  [[MOE_METAL_AMX]] void restore() { _tile_loadconfig(&before_); }
  Config before_;
};

// c[g] = a tile row of weights times token tile g, whose first chunk is at tokens + g * size. One tile row at a time:
// memory serves the addresses of its 16 rows well (32 were 5 % slower for one token). ahead(b) is called before each
// chunk b, and may unpack later chunks.
template <int G, class Ahead = Nothing>
[[MOE_METAL_AMX]] inline void multiply_tiles(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                             int64_t chunks, float (*c)[kTile][kTile], bool add,
                                             const Ahead& ahead = Nothing()) {
  static_assert(1 <= G && G <= 4);
  if (add) {
    _tile_loadd(0, c[0], 64);
    if constexpr (G > 1) _tile_loadd(1, c[1], 64);
    if constexpr (G > 2) _tile_loadd(2, c[2], 64);
    if constexpr (G > 3) _tile_loadd(3, c[3], 64);
  } else {
    _tile_zero(0);
    if constexpr (G > 1) _tile_zero(1);
    if constexpr (G > 2) _tile_zero(2);
    if constexpr (G > 3) _tile_zero(3);
  }
  for (int64_t b = 0; b < chunks; ++b) {
    const at::BFloat16* here = tokens + b * kTileSize;
    ahead(b);
    _tile_loadd(4, weights.data + (b & weights.ring) * weights.chunk, weights.row * 2);
    _tile_loadd(5, here, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (G > 1) {
      _tile_loadd(6, here + size, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (G > 2) {
      _tile_loadd(7, here + 2 * size, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (G > 3) {
      _tile_loadd(5, here + 3 * size, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c[0], 64);
  if constexpr (G > 1) _tile_stored(1, c[1], 64);
  if constexpr (G > 2) _tile_stored(2, c[2], 64);
  if constexpr (G > 3) _tile_stored(3, c[3], 64);
}

// Two tile rows at a time, for two or three tiles of tokens. Of two, each tile is loaded once per chunk: on an Emerald
// Rapids whose cores are shared with other programs, loads take as long as products. The sums of three take six
// registers, so the lower tile row reads two tiles again, from the L1 cache.
template <int G, class Ahead>
[[MOE_METAL_AMX]] inline void multiply_two(const WeightTiles& upper, const WeightTiles& lower,
                                           const at::BFloat16* tokens, int64_t size, int64_t chunks,
                                           float (*c0)[kTile][kTile], float (*c1)[kTile][kTile], const Ahead& ahead) {
  static_assert(2 <= G && G <= 3);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (G > 2) _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  if constexpr (G > 2) _tile_zero(5);
  for (int64_t b = 0; b < chunks; ++b) {
    const at::BFloat16* here = tokens + b * kTileSize;
    ahead(b);
    _tile_loadd(6, upper.data + (b & upper.ring) * upper.chunk, upper.row * 2);
    _tile_loadd(7, here, 64);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (G > 2) {
      _tile_loadd(7, here + size, 64);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, here + 2 * size, 64);
      _tile_dpbf16ps(2, 6, 7);
    } else {
      _tile_loadd(5, here + size, 64);
      _tile_dpbf16ps(1, 6, 5);
    }
    _tile_loadd(6, lower.data + (b & lower.ring) * lower.chunk, lower.row * 2);
    if constexpr (G > 2) {
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(7, here + size, 64);
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, here, 64);
    } else {
      _tile_dpbf16ps(4, 6, 5);
    }
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, c0[0], 64);
  _tile_stored(1, c0[1], 64);
  if constexpr (G > 2) _tile_stored(2, c0[2], 64);
  _tile_stored(3, c1[0], 64);
  _tile_stored(4, c1[1], 64);
  if constexpr (G > 2) _tile_stored(5, c1[2], 64);
}

// Indexed by the number of token tiles minus one.
constexpr decltype(&multiply_tiles<1>) kMultiply[] = {multiply_tiles<1>, multiply_tiles<2>, multiply_tiles<3>,
                                                      multiply_tiles<4>};
constexpr int64_t kTokenTiles = std::size(kMultiply);

}  // namespace moe_metal
