// Matrix products in bfloat16 on processors with AMX, or with AVX512-BF16: tiles of 16 x 32 weights.
//
//   c[r][n] = sum over k of weight(r, k) * token[k][n]     16 rows, 16 tokens, k in steps of 32
//
// Weights are the left operand, which both read as it lies in memory; what they want rearranged (pairs of k side by
// side, token by token) is the right one, and tokens are few. Matrices that are not row-major, or whose sizes are no
// multiples of a tile's, are rearranged 16 rows at a time in cache. Sums are float, in an order that depends on the
// matrix alone.
#pragma once
#if defined(CPU_CAPABILITY_AVX512) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <iterator>
#include <vector>

#include "vec.h"

namespace moe_metal {

constexpr int64_t kTile = 16;   // rows of a weight tile, and tokens of a token tile
constexpr int64_t kDepth = 32;  // bfloat16 of k in a tile
constexpr int64_t kTileSize = kTile * kDepth;
static_assert(kLanes == kTile);

// Whether the processor has AMX for bfloat16 and for bytes and Linux lets this process use it.
inline bool tiles_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

#define MOE_METAL_AMX [[gnu::target("amx-tile,amx-bf16")]]

// All eight tiles as 16 rows of 64 bytes, for the life of this object and on this thread; nothing without AMX.
class TileShapes {
 public:
  TileShapes() {
    if (tiles_available()) configure();
  }
  ~TileShapes() {
    if (tiles_available()) restore();
  }
  TileShapes(const TileShapes&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  // In memory, since compilers see just the first words that the instruction reads.
  static constexpr Config kOurs = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile}};
  MOE_METAL_AMX void configure() {
    _tile_storeconfig(&before_);
    _tile_loadconfig(&kOurs);
  }
  MOE_METAL_AMX void restore() { _tile_loadconfig(&before_); }
  Config before_;
};

// 16 rows of a weight matrix: row r's k block b stands at data + r * row + b * block, or, in a ring of blocks, where
// the last bits of b say.
struct WeightTiles {
  const at::BFloat16* data;
  int64_t row, block;
  int64_t ring = -1;
};

// What products do besides, in kParts parts for each block of k: between two products of tiles each, since the one
// waits for the tiles' unit and the other for vectors.
constexpr int64_t kParts = 4;

struct Nothing {
  void operator()(int64_t, int64_t) const {}
};

// So many streams as two strips have want help: 32 tokens for each of 128 experts took 58 ms without, and take 52.
struct Prefetch {
  const WeightTiles& weights;
  void operator()(int64_t b, int64_t part) const {
    constexpr int64_t kAhead = 4;
    if (part > 0) return;
    for (int64_t r = 0; r < kTile; ++r)
      __builtin_prefetch(weights.data + (b + kAhead) * weights.block + r * weights.row);
  }
};

// c[g] = a strip of weights times token tile g, of which tokens + g * size is the first block. One strip at a time: its
// 16 rows are as many streams as memory serves well (32 were 5 % slower for one token). With each block comes
// ahead(block, part) for its parts, which may make the blocks after it.
template <int G, class Ahead = Nothing>
MOE_METAL_AMX inline void multiply_tiles(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                         int64_t blocks, float (*c)[kTile][kTile], bool add,
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
  for (int64_t b = 0; b < blocks; ++b) {
    const at::BFloat16* here = tokens + b * kTileSize;
    ahead(b, 0);
    _tile_loadd(4, weights.data + (b & weights.ring) * weights.block, weights.row * 2);
    _tile_loadd(5, here, 64);
    _tile_dpbf16ps(0, 4, 5);
    ahead(b, 1);
    if constexpr (G > 1) {
      _tile_loadd(6, here + size, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    ahead(b, 2);
    if constexpr (G > 2) {
      _tile_loadd(7, here + 2 * size, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    ahead(b, 3);
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

// Two strips at a time, for two or three tiles of tokens, which the second strip then finds in the first cache.
template <int G, class Ahead>
MOE_METAL_AMX inline void multiply_two(const WeightTiles& upper, const WeightTiles& lower, const at::BFloat16* tokens,
                                       int64_t size, int64_t blocks, float (*c0)[kTile][kTile],
                                       float (*c1)[kTile][kTile], const Ahead& ahead) {
  static_assert(2 <= G && G <= 3);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if constexpr (G > 2) _tile_zero(4);
  if constexpr (G > 2) _tile_zero(5);
  for (int64_t b = 0; b < blocks; ++b) {
    const at::BFloat16* here = tokens + b * kTileSize;
    ahead(b, 0);
    _tile_loadd(6, upper.data + (b & upper.ring) * upper.block, upper.row * 2);
    _tile_loadd(7, here, 64);
    _tile_dpbf16ps(0, 6, 7);
    ahead(b, 1);
    _tile_loadd(7, here + size, 64);
    _tile_dpbf16ps(1, 6, 7);
    ahead(b, 2);
    if constexpr (G > 2) {
      _tile_loadd(7, here + 2 * size, 64);
      _tile_dpbf16ps(4, 6, 7);
    }
    _tile_loadd(6, lower.data + (b & lower.ring) * lower.block, lower.row * 2);
    if constexpr (G > 2) {
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(7, here + size, 64);
    }
    _tile_dpbf16ps(3, 6, 7);
    ahead(b, 3);
    _tile_loadd(7, here, 64);
    _tile_dpbf16ps(2, 6, 7);
  }
  _tile_stored(0, c0[0], 64);
  _tile_stored(1, c0[1], 64);
  _tile_stored(2, c1[0], 64);
  _tile_stored(3, c1[1], 64);
  if constexpr (G > 2) _tile_stored(4, c0[2], 64);
  if constexpr (G > 2) _tile_stored(5, c1[2], 64);
}

// c[g] += a strip of weights times token tile g, without AMX: a vector holds a pair of k of 16 tokens, and meets the
// same pair of each row of weights.
template <int G>
[[MOE_METAL_BF16]] inline void multiply_by_vectors(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                                   int64_t blocks, float (*c)[kTile][kTile]) {
  constexpr int R = 16 / G;  // rows whose sums are in registers
  for (int64_t first = 0; first < kTile; first += R) {
    __m512 sums[R][G];
    MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) sums[i / G][i % G] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
      const at::BFloat16* rows = weights.data + b * weights.block + first * weights.row;
      for (int64_t pair = 0; pair < kTile; ++pair) {
        __m512i token[G];
        MOE_METAL_UNROLL for (int g = 0; g < G; ++g) {
          token[g] = _mm512_loadu_si512(tokens + g * size + b * kTileSize + pair * kDepth);
        }
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          int32_t both;
          std::memcpy(&both, rows + r * weights.row + 2 * pair, sizeof(both));
          const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
          MOE_METAL_UNROLL for (int g = 0; g < G; ++g) {
            sums[r][g] = _mm512_dpbf16_ps(sums[r][g], reinterpret_cast<__m512bh>(token[g]), weight);
          }
        }
      }
    }
    MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) _mm512_storeu_ps(c[i % G][first + i / G], sums[i / G][i % G]);
  }
}

// By the number of token tiles less one.
template <class Ahead = Nothing>
constexpr decltype(&multiply_tiles<1, Ahead>) kMultiply[] = {multiply_tiles<1, Ahead>, multiply_tiles<2, Ahead>,
                                                             multiply_tiles<3, Ahead>, multiply_tiles<4, Ahead>};
constexpr int64_t kGroups = std::size(kMultiply<>);

// `count` bfloat16, and zeros up to a tile's depth.
inline __m512i load_part(const at::BFloat16* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(count >= kDepth ? ~0u : (1u << count) - 1, from);
}

// Rows to left operands, where AMX cannot read them as they lie: tiles of 16 rows side by side, filled up with zeros.
inline void pack_rows(const Matrix<at::BFloat16>& weight, at::BFloat16* to) {
  __m512i tile[kTile];
  const auto load_row = [&](int64_t r, int64_t k) {
    return r < weight.rows ? load_part(weight.data + r * weight.row + k, weight.columns - k) : _mm512_setzero_si512();
  };
  // Rows r = 0 .. 15 of column k, in the low halves of words. Rows may lie side by side or be every other one.
  const auto load_column = [&](int64_t k) {
    if (weight.rows <= 0 || k >= weight.columns) return _mm512_setzero_si512();
    const auto* from = weight.data + k * weight.column;
    if (weight.row == 1) return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << weight.rows) - 1, from));
    return _mm512_and_si512(load_part(from, 2 * weight.rows - 1), _mm512_set1_epi32(0xffff));
  };
  for (int64_t k = 0; k < weight.columns; k += kDepth, to += kTileSize) {
    if (weight.column == 1) {
      for (int64_t r = 0; r < kTile; ++r) tile[r] = load_row(r, k);
    } else if (weight.row == 1 || weight.row == 2) {
      for (int64_t p = 0; p < kTile; ++p) {
        tile[p] = _mm512_or_si512(load_column(k + 2 * p), _mm512_slli_epi32(load_column(k + 2 * p + 1), 16));
      }
      transpose(tile);
    } else {
      alignas(64) at::BFloat16 gathered[kTile][kDepth] = {};
      for (int64_t r = 0; r < weight.rows; ++r) {
        const auto* row = weight.data + r * weight.row;
        for (int64_t c = k; c < std::min(k + kDepth, weight.columns); ++c) gathered[r][c - k] = row[c * weight.column];
      }
      for (int64_t r = 0; r < kTile; ++r) tile[r] = _mm512_load_si512(gathered[r]);
    }
    for (int64_t r = 0; r < kTile; ++r) _mm512_storeu_si512(to + r * kDepth, tile[r]);
  }
}

// Strips of 16 rows as left operands. Each matrix has at most 16 rows; a strip past the last row is all zeros.
class Strips {
 public:
  Strips(int64_t count, int64_t columns) : tiles(count), blocks_(at::divup(columns, kDepth)) {}
  int64_t blocks() const { return blocks_; }

  void read(int64_t which, const Matrix<at::BFloat16>& weight) {
    if (weight.column == 1 && weight.rows == kTile && weight.columns % kDepth == 0) {
      tiles[which] = {weight.data, weight.row, kDepth};
      return;
    }
    pack_rows(weight, panel(which));
  }
  // Where a strip comes that does not lie in memory as AMX reads it: as pack_rows() leaves it.
  at::BFloat16* panel(int64_t which) {
    panels_.resize(tiles.size() * blocks_ * kTileSize);
    at::BFloat16* panel = panels_.data() + which * blocks_ * kTileSize;
    tiles[which] = {panel, kDepth, kTileSize};
    return panel;
  }
  std::vector<WeightTiles> tiles;

 private:
  int64_t blocks_;
  std::vector<at::BFloat16> panels_;
};

// Up to 16 rows of n bfloat16 as a right operand: pairs of k side by side, row by row. Zeros fill it up. The pairs of
// the next k stand `step` further.
template <class RowOf>
inline void pack_right(RowOf&& row_of, int64_t count, int64_t n, at::BFloat16* to, int64_t step = kDepth) {
  for (int64_t k = 0; k < n; k += kDepth) {
    __m512i tile[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      tile[i] = i < count ? load_part(row_of(i) + k, n - k) : _mm512_setzero_si512();
    }
    transpose(tile);
    for (int64_t p = 0; p < kTile; ++p, to += step) _mm512_storeu_si512(to, tile[p]);
  }
}

// The products of two strips with up to kGroups groups of tokens.
struct Products {
  alignas(64) float c[2][kGroups][kTile][kTile];

  // One group is bound by memory, which serves one strip's streams best; the sums of four leave no room for a second's.
  static bool in_pairs(int64_t groups) { return groups == 2 || groups == 3; }

  void multiply(const Strips& strips, const at::BFloat16* tokens, int64_t size, int64_t groups) {
    const int64_t blocks = strips.blocks();
    if (!tiles_available()) {
      for (int w = 0; w < 2; ++w) {
        for (int64_t i = 0; i < groups; i += 2) {
          (i + 1 < groups ? multiply_by_vectors<2> : multiply_by_vectors<1>)(strips.tiles[w], tokens + i * size, size,
                                                                             blocks, c[w] + i);
        }
      }
    } else if (in_pairs(groups)) {
      multiply(strips, tokens, size, groups, Prefetch{strips.tiles[0]}, Prefetch{strips.tiles[1]});
    } else {
      multiply(strips, tokens, size, groups, Nothing(), Nothing());
    }
  }

  // With AMX. With each block of a strip comes ahead(block, part), which may make the blocks after it.
  template <class Ahead>
  void multiply(const Strips& strips, const at::BFloat16* tokens, int64_t size, int64_t groups, const Ahead& upper,
                const Ahead& lower) {
    const int64_t blocks = strips.blocks();
    if (in_pairs(groups)) {
      // 52 ms instead of 56 strip by strip
      const auto both = [&](int64_t block, int64_t part) { upper(block, part), lower(block, part); };
      (groups == 2 ? multiply_two<2, decltype(both)> : multiply_two<3, decltype(both)>)(strips.tiles[0],
                                                                                        strips.tiles[1], tokens, size,
                                                                                        blocks, c[0], c[1], both);
    } else {
      kMultiply<Ahead>[groups - 1](strips.tiles[0], tokens, size, blocks, c[0], false, upper);
      kMultiply<Ahead>[groups - 1](strips.tiles[1], tokens, size, blocks, c[1], false, lower);
    }
  }
};

}  // namespace moe_metal
#endif
