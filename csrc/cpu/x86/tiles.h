// Matrix products in bfloat16 on processors with AMX, or with AVX512-BF16: tiles of 16 x 32 weights.
//
//   c[r][n] = sum over k of weight(r, k) * token[k][n]     16 rows, 16 tokens, k in steps of 32
//
// Weights are the left operand, which the instructions read in place. The right operand must be rearranged (contiguous
// pairs of k, token by token); it has the tokens, which are few. Matrices that are not row-major, or whose sizes are
// not multiples of a tile's, are rearranged 16 rows at a time in cache. Sums are float, in an order that depends only
// on the matrix.
#pragma once
#include <vector>

#include "cpu/x86/amx_bf16.h"
#include "cpu/x86/avx512_bf16.h"

namespace moe_metal {

// Loads `count` bfloat16, and zeros up to a tile's depth.
inline __m512i load_part(const at::BFloat16* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(count >= kDepth ? ~0u : (1u << count) - 1, from);
}

// Copies rows to left operands if AMX cannot read them in place: contiguous tiles of 16 rows, padded with zeros.
inline void pack_rows(const Matrix<at::BFloat16>& weight, at::BFloat16* to) {
  __m512i tile[kTile];
  const auto load_row = [&](int64_t r, int64_t k) {
    return r < weight.rows ? load_part(weight.data + r * weight.row + k, weight.columns - k) : _mm512_setzero_si512();
  };
  for (int64_t k = 0; k < weight.columns; k += kDepth, to += kTileSize) {
    if (weight.column == 1) {
      for (int64_t r = 0; r < kTile; ++r) tile[r] = load_row(r, k);
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

// Tile rows as left operands. Each matrix has at most 16 rows; those past the last are zero.
class TileRows {
 public:
  TileRows(int64_t count, int64_t columns) : tiles(count), chunks_(at::divup(columns, kDepth)) {}
  int64_t chunks() const { return chunks_; }

  void read(int64_t which, const Matrix<at::BFloat16>& weight) {
    if (weight.column == 1 && weight.rows == kTile && weight.columns % kDepth == 0) {
      tiles[which] = {weight.data, weight.row, kDepth};
      return;
    }
    pack_rows(weight, memory(which, which));
  }
  // Memory for a tile row that AMX cannot read in place, in the layout of pack_rows(): that of tile row `at`.
  at::BFloat16* memory(int64_t which, int64_t at) {
    memory_.resize(tiles.size() * chunks_ * kTileSize);
    at::BFloat16* to = memory_.data() + at * chunks_ * kTileSize;
    tiles[which] = {to, kDepth, kTileSize};
    return to;
  }
  std::vector<WeightTiles> tiles;

 private:
  int64_t chunks_;
  std::vector<at::BFloat16> memory_;
};

// Copies up to 16 rows of n bfloat16 to a right operand: for each pair of k, the pairs of all rows, padded with zeros.
template <class RowOf>
inline void pack_right(RowOf&& row_of, int64_t count, int64_t n, at::BFloat16* to) {
  for (int64_t k = 0; k < n; k += kDepth) {
    __m512i tile[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      tile[i] = i < count ? load_part(row_of(i) + k, n - k) : _mm512_setzero_si512();
    }
    transpose(tile);
    for (int64_t p = 0; p < kTile; ++p, to += kDepth) _mm512_storeu_si512(to, tile[p]);
  }
}

// How many of these tiles of tokens are multiplied together. With AMX, three tiles need fewer bytes of the L2 cache
// for a product than two: of 4,096 tokens, dense experts take 0.97 of the time, and packed ones 0.96 (on an Intel with
// 480 MB of L3 cache).
inline int64_t tiles_at_once(int64_t count) {
  if (amx_available()) return count > kTokenTiles ? 3 : count;
  return count == 4 ? 2 : std::min<int64_t>(count, 3);  // not three and then one
}

// c[g] = some chunks of a tile row times tiles of tokens (with AMX up to kTokenTiles); with `add`, c[g] += them.
inline void multiply_tile_row(const WeightTiles& weights, const TokenTiles& tokens, int64_t chunks,
                              float (*c)[kTile][kTile], bool add) {
  if (amx_available()) {
    kMultiply[tokens.count() - 1](weights, tokens.data, tokens.size, chunks, c, add, Nothing());
    return;
  }
  // The products of up to three whole tiles, without and with half a tile.
  static constexpr decltype(&multiply_by_vectors<1, false>) kProducts[4][2] = {
      {nullptr, multiply_by_vectors<0, true>},
      {multiply_by_vectors<1, false>, multiply_by_vectors<1, true>},
      {multiply_by_vectors<2, false>, multiply_by_vectors<2, true>},
      {multiply_by_vectors<3, false>, nullptr}};
  for (int64_t g = 0, count; g < tokens.count(); g += count) {
    count = tiles_at_once(tokens.count() - g);
    const TokenTiles some = tokens.subrange(g, count);
    const bool half = some.tokens <= count * kTile - kTile / 2;
    kProducts[count - half][half](weights, some.data, some.size, chunks, c + g, add, Nothing());
  }
}

// The products of two tile rows with up to kTokenTiles tiles of tokens.
struct Products {
  alignas(64) float c[2][kTokenTiles][kTile][kTile];

  // Whether to multiply two tile rows at a time. One tile of tokens is limited by memory, which serves the addresses of
  // one tile row best. The sums of two tile rows and four tiles of tokens do not fit in registers, so two tiles follow
  // the other two.
  static bool in_pairs(int64_t tiles) { return tiles > 1; }

  void multiply(const WeightTiles* pair, const TokenTiles& tokens, int64_t chunks) {
    if (amx_available()) return multiply(pair, tokens, chunks, Nothing(), Nothing());
    for (int w = 0; w < 2; ++w) multiply_tile_row(pair[w], tokens, chunks, c[w], false);
  }

  // With AMX. `upper` and `lower` are called before each chunk, and may unpack later chunks of their tile rows.
  template <class Ahead>
  void multiply(const WeightTiles* pair, const TokenTiles& tokens, int64_t chunks, const Ahead& upper,
                const Ahead& lower) {
    const int64_t count = tokens.count();
    if (in_pairs(count)) {
      // 52 ms instead of 56 with one tile row at a time
      const auto both = [&](int64_t chunk) { upper(chunk), lower(chunk); };
      const auto multiply = [&](auto product, int64_t g, const auto& ahead) {
        product(pair[0], pair[1], tokens.data + g * tokens.size, tokens.size, chunks, c[0] + g, c[1] + g, ahead);
      };
      if (count == 3) return multiply(multiply_two<3, decltype(both)>, 0, both);
      multiply(multiply_two<2, decltype(both)>, 0, both);
      if (count == 4) multiply(multiply_two<2, Nothing>, 2, Nothing());
    } else {
      multiply_tiles<1>(pair[0], tokens.data, tokens.size, chunks, c[0], false, upper);
      multiply_tiles<1>(pair[1], tokens.data, tokens.size, chunks, c[1], false, lower);
    }
  }
};

}  // namespace moe_metal
