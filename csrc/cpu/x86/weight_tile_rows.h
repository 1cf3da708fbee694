// The rows of a weight in any format as left operands of the products of x86/tiles.h, for experts and linear.
#pragma once
#include "cpu/weights/weight_rows.h"
#include "cpu/x86/transposed_rows.h"

namespace moe_metal {

// Pairs of tile rows of a weight. Packed numbers are converted to bfloat16: exactly for mxfp4, rounded for other
// formats.
class WeightTileRows {
 public:
  WeightTileRows(const Weight& weight, int64_t pairs) : weight_(weight), tile_rows_(2 * pairs, weight.columns) {
    if (weight.format->is_dense()) return;
    for (int64_t i = 0; i < 2 * pairs; ++i) packed_.push_back({tile_row_of(weight)});
  }

  // Whether rows must be given to read_transposed() before their tile rows are read, at best kTransposed of them.
  static bool transposed(const Weight& weight) {
    return weight.format->is_dense() && weight.row == 1 && weight.column != 1;
  }
  static constexpr int64_t kTransposed = 128;

  void read_transposed(int64_t which, int64_t expert, int64_t first, int64_t count, int64_t step) {
    transposed_[which].read(weight_, expert, first, count, step);
  }

  // Selects tile row `which`, and the one that will probably be read after it, which is prefetched.
  void read(int64_t which, const TileRowRange& rows, const TileRowRange& next) {
    for (const TransposedRows& some : transposed_) {
      if (some.contain(rows)) {
        tile_rows_.tiles[which] = some.tile_row(rows.first);
        return;
      }
    }
    if (packed()) {
      packed_[which].rows = rows, packed_[which].next = next;
      return;
    }
    const auto* data = elements<at::BFloat16>(weight_.data) + weight_.row_start(rows.expert, rows.first);
    tile_rows_.read(which, {data, rows.step * weight_.row, weight_.column, rows.count, weight_.columns});
  }

  // Calls use(pair, g, c0, c1) for each tile g of tokens with its products with the first `pairs` pairs of tile rows. A
  // few tiles of tokens are multiplied by all of them, while they are in the L2 cache.
  template <class Use>
  void multiply(int64_t pairs, const TokenTiles& tokens, Use&& use) {
    for (int64_t g = 0, count; g < tokens.count(); g += count) {
      const bool first = g == 0 && packed();
      count = first ? tiles_of_unpacking(tokens) : tiles_at_once(tokens.count() - g);
      const TokenTiles some = tokens.subrange(g, count);
      for (int64_t p = 0; p < pairs; ++p) {
        if (first)
          unpack_and_multiply(p, some, tokens.count() > count);
        else
          products_.multiply(&tile_rows_.tiles[2 * p], some, tile_rows_.chunks());
        for (int64_t i = 0; i < count; ++i) use(p, g + i, products_.c[0][i], products_.c[1][i]);
      }
    }
  }

 private:
  static constexpr int64_t kAtOnce = 2;  // chunks

  struct Selected {
    std::unique_ptr<PackedTileRow> tile_row;
    TileRowRange rows, next;
    PackedTileRow& start() const {
      tile_row->start(rows, next);
      return *tile_row;
    }
  };

  bool packed() const { return !weight_.format->is_dense(); }

  // How many tiles of tokens are multiplied while a tile row is unpacked. Without AMX the sums of three leave no
  // registers for it.
  static int64_t tiles_of_unpacking(const TokenTiles& tokens) {
    const int64_t count = tiles_at_once(tokens.count());
    return !amx_available() && tokens.tokens > 2 * kTile + kTile / 2 ? 2 : count;
  }

  // Unpacks two chunks of a tile row while AMX multiplies the two chunks before them by the first tiles of tokens. With
  // two tile rows at a time, the upper one is unpacked at even chunks and the lower one at odd ones. Chunks that no
  // later tokens need stay in the L1 cache. (A few rows of the chunks at a time took 1.05 to 1.1 of the time in most
  // formats, on an Emerald Rapids.)
  void unpack_and_multiply(int64_t pair, const TokenTiles& tokens, bool more) {
    if (!amx_available()) {
      for (int w = 0; w < 2; ++w) unpack_and_multiply_tile_row(2 * pair + w, tokens, more, products_.c[w]);
      return;
    }
    const bool in_pairs = Products::in_pairs(tokens.count());
    const auto ahead = [&](int64_t w) {
      const int64_t which = 2 * pair + w;
      const int64_t ring = more || tokens.count() == kTokenTiles ? ~int64_t{0} : 2 * kAtOnce - 1;
      at::BFloat16* to = tile_rows_.memory(which, more ? which : w);
      tile_rows_.tiles[which].ring = ring;
      const auto unpack = [this, &tile_row = packed_[which].start(), ring, to](int64_t chunk) {
        const int64_t first = chunk * kDepth, columns = std::min(kAtOnce * kDepth, weight_.columns - first);
        if (columns > 0) tile_row.pack(first, columns, to + (chunk & ring) * kTileSize);
      };
      unpack(0);
      return [unpack, offset = in_pairs ? w : 0](int64_t chunk) {
        if (chunk % kAtOnce == offset) unpack(chunk - offset + kAtOnce);
      };
    };
    products_.multiply(&tile_rows_.tiles[2 * pair], tokens, tile_rows_.chunks(), ahead(0), ahead(1));
  }

  // Without AMX, a tile row is unpacked during its product with the first tokens.
  void unpack_and_multiply_tile_row(int64_t which, const TokenTiles& tokens, bool more, float (*c)[kTile][kTile]) {
    PackedTileRow& tile_row = packed_[which].start();
    // Memory of a tile row that no later tokens need is used again for the next, while it is in the L1 cache.
    at::BFloat16* to = tile_rows_.memory(which, more ? which : which % 2);
    WeightTiles& tiles = tile_rows_.tiles[which];
    tiles.ring = more ? ~int64_t{0} : 2 * kAtOnce - 1;
    if (tokens.tokens > kTile / 2 && tile_row.multiply(tiles, tokens, c)) return;
    tiles.ring = -1;
    tile_row.pack(0, weight_.columns, to);
    multiply_tile_row(tiles, tokens, tile_rows_.chunks(), c, false);
  }

  const Weight& weight_;
  std::vector<Selected> packed_;
  TransposedRows transposed_[2];
  TileRows tile_rows_;
  Products products_;
};

// Transposes the products of two tile rows with a tile of tokens: to[n] has the results of token n for the 32 rows.
inline void by_tokens(const float (&upper)[kTile][kTile], const float (&lower)[kTile][kTile],
                      float (&to)[kTile][2 * kTile]) {
  for (const auto* half : {&upper, &lower}) {
    __m512i tile[kTile];
    for (int64_t r = 0; r < kTile; ++r) tile[r] = _mm512_loadu_si512((*half)[r]);
    transpose(tile);
    for (int64_t n = 0; n < kTile; ++n) _mm512_store_si512(to[n] + (half == &lower) * kTile, tile[n]);
  }
}

}  // namespace moe_metal
