// Rows of a transposed weight, whose columns are contiguous, as left operands of the products of x86/tiles.h.
#pragma once
#include <array>
#include <vector>

#include "cpu/x86/packed_tile_row.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

// Some rows of an expert, rearranged together: each column is in another page of memory, and finding the page takes
// longer than reading a few of its rows. gpt-oss-20b's experts with 512 tokens take 345 ms on a Zen 4, and took 535
// with tile rows that were rearranged one by one. A prefetch of the chunk after the next is a part of that: without it
// they take 395 ms.
class TransposedRows {
 public:
  // Reads `count` rows: pairs of tile rows of 16 neighbours, or with step 2 of every second of 32 rows.
  void read(const Weight& weight, int64_t expert, int64_t first, int64_t count, int64_t step) {
    expert_ = expert, first_ = first, count_ = count, step_ = step;
    chunks_ = at::divup(weight.columns, kDepth);
    tiles_.resize(at::divup(count, kPair) * 2 * chunks_ * kTileSize);
    const auto* from = elements<at::BFloat16>(weight.data) + weight.row_start(expert, first);
    for (int64_t b = 0; b < chunks_; ++b) {
      const int64_t left = weight.columns - b * kDepth;
      for (int64_t r = 0; r < count; r += kPair) {
        rearrange(from + b * kDepth * weight.column + r, weight.column, count - r, left, step == 2,
                  tiles_.data() + (r / kTile * chunks_ + b) * kTileSize);
      }
    }
  }
  bool contain(const TileRowRange& tile_row) const {
    return tile_row.expert == expert_ && tile_row.step == step_ && first_ <= tile_row.first &&
           tile_row.first < first_ + count_;
  }
  WeightTiles tile_row(int64_t first) const {
    const int64_t row = first - first_, number = step_ == 2 ? row / kPair * 2 + row % 2 : row / kTile;
    return {tiles_.data() + number * chunks_ * kTileSize, kDepth, kTileSize};
  }

 private:
  static constexpr int64_t kPair = 2 * kTile;

  // Rearranges a chunk of two tile rows. `rows` and `columns` are those that are left.
  void rearrange(const at::BFloat16* from, int64_t column, int64_t rows, int64_t columns, bool interleaved,
                 at::BFloat16* to) const {
    // Words of two columns alternate: those of the rows 0 to 15, and those of the rows 16 to 31.
    alignas(64) static constexpr auto kHalves = [] {
      std::array<std::array<uint16_t, 32>, 2> words{};
      for (int i = 0; i < 64; ++i) words[i / 32][i % 32] = static_cast<uint16_t>(i % 2 * 32 + i / 2);
      return words;
    }();
    const __mmask32 mask = rows < kPair ? (1u << rows) - 1 : ~0u;
    const auto load_column = [&](int64_t k) {
      __builtin_prefetch(from + (k + 2 * kDepth) * column, 0, 2);
      return k < columns ? _mm512_maskz_loadu_epi16(mask, from + k * column) : _mm512_setzero_si512();
    };
    __m512i tile_rows[2][kTile];
    for (int64_t p = 0; p < kTile; ++p) {  // pairs of columns, with the rows in the lanes
      const __m512i even = load_column(2 * p), odd = load_column(2 * p + 1);
      if (interleaved) {
        tile_rows[0][p] = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
        tile_rows[1][p] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
      } else {
        for (int i = 0; i < 2; ++i) {
          tile_rows[i][p] = _mm512_permutex2var_epi16(even, _mm512_load_si512(kHalves[i].data()), odd);
        }
      }
    }
    for (auto& tile_row : tile_rows) {
      transpose(tile_row);
      for (int64_t r = 0; r < kTile; ++r) _mm512_storeu_si512(to + r * kDepth, tile_row[r]);
      to += chunks_ * kTileSize;
    }
  }

  int64_t expert_ = -1, first_ = 0, count_ = 0, step_ = 1, chunks_ = 0;
  std::vector<at::BFloat16> tiles_;
};

}  // namespace moe_metal
