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

// Strips of 16 rows as left operands. Each matrix has at most 16 rows; a strip past the last row is zero.
class Strips {
 public:
  Strips(int64_t count, int64_t columns) : tiles(count), blocks_(at::divup(columns, kDepth)) {}
  int64_t blocks() const { return blocks_; }

  void read(int64_t which, const Matrix<at::BFloat16>& weight) {
    if (weight.column == 1 && weight.rows == kTile && weight.columns % kDepth == 0) {
      tiles[which] = {weight.data, weight.row, kDepth};
      return;
    }
    pack_rows(weight, panel(which, which));
  }
  // Memory for a strip that AMX cannot read in place, in the layout of pack_rows(): that of strip `place`.
  at::BFloat16* panel(int64_t which, int64_t place) {
    panels_.resize(tiles.size() * blocks_ * kTileSize);
    at::BFloat16* panel = panels_.data() + place * blocks_ * kTileSize;
    tiles[which] = {panel, kDepth, kTileSize};
    return panel;
  }
  std::vector<WeightTiles> tiles;

 private:
  int64_t blocks_;
  std::vector<at::BFloat16> panels_;
};

// Copies up to 16 rows of n bfloat16 to a right operand: for each pair of k, the pairs of all rows, padded with zeros.
// The next pair of k is `step` further.
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

// How many of these groups of tokens are multiplied together. With AMX, three groups need fewer bytes of the L2 cache
// for a product than two: of 4,096 tokens, dense experts take 0.97 of the time, and packed ones 0.96 (on an Intel with
// 480 MB of L3 cache).
inline int64_t groups_at_once(int64_t groups) {
  if (amx_available()) return groups > kGroups ? 3 : groups;
  return groups == 4 ? 2 : std::min<int64_t>(groups, 3);  // not three and then one
}

// c[g] = some blocks of a strip times groups of tokens (with AMX up to kGroups); with `add`, c[g] += them.
inline void multiply_strip(const WeightTiles& weights, const TokenGroups& groups, int64_t blocks,
                           float (*c)[kTile][kTile], bool add) {
  if (amx_available()) {
    kMultiply[groups.count() - 1](weights, groups.data, groups.size, blocks, c, add, Nothing());
    return;
  }
  // The products of up to three whole tiles, without and with half a tile.
  static constexpr decltype(&multiply_by_vectors<1, false>) kProducts[4][2] = {
      {nullptr, multiply_by_vectors<0, true>},
      {multiply_by_vectors<1, false>, multiply_by_vectors<1, true>},
      {multiply_by_vectors<2, false>, multiply_by_vectors<2, true>},
      {multiply_by_vectors<3, false>, nullptr}};
  for (int64_t g = 0, count; g < groups.count(); g += count) {
    count = groups_at_once(groups.count() - g);
    const TokenGroups some = groups.subrange(g, count);
    const bool half = some.tokens <= count * kTile - kTile / 2;
    kProducts[count - half][half](weights, some.data, some.size, blocks, c + g, add, Nothing());
  }
}

// The products of a pair of strips with up to kGroups groups of tokens.
struct Products {
  alignas(64) float c[2][kGroups][kTile][kTile];

  // Whether to multiply two strips at a time. One group is limited by memory, which serves the streams of one strip
  // best. The sums of two strips and four groups do not fit in registers, so two groups follow the other two.
  static bool in_pairs(int64_t groups) { return groups > 1; }

  void multiply(const WeightTiles* pair, const TokenGroups& groups, int64_t blocks) {
    if (amx_available()) return multiply(pair, groups, blocks, Nothing(), Nothing());
    for (int w = 0; w < 2; ++w) multiply_strip(pair[w], groups, blocks, c[w], false);
  }

  // With AMX. `upper` and `lower` are called before each block, and may unpack later blocks of their strips.
  template <class Ahead>
  void multiply(const WeightTiles* pair, const TokenGroups& groups, int64_t blocks, const Ahead& upper,
                const Ahead& lower) {
    const int64_t count = groups.count();
    if (in_pairs(count)) {
      // 52 ms instead of 56 with one strip at a time
      const auto both = [&](int64_t block) { upper(block), lower(block); };
      const auto multiply = [&](auto product, int64_t g, const auto& ahead) {
        product(pair[0], pair[1], groups.data + g * groups.size, groups.size, blocks, c[0] + g, c[1] + g, ahead);
      };
      if (count == 3) return multiply(multiply_two_by_three<decltype(both)>, 0, both);
      multiply(multiply_two_by_two<decltype(both)>, 0, both);
      if (count == 4) multiply(multiply_two_by_two<Nothing>, 2, Nothing());
    } else {
      multiply_tiles<1>(pair[0], groups.data, groups.size, blocks, c[0], false, upper);
      multiply_tiles<1>(pair[1], groups.data, groups.size, blocks, c[1], false, lower);
    }
  }
};

}  // namespace moe_metal
