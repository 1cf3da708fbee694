// The rows of a weight in any format as left operands of the products of x86/tiles.h, for experts and linear.
#pragma once
#include "cpu/weights/weight_rows.h"
#include "cpu/x86/transposed_rows.h"

namespace moe_metal {

// Two strips of a weight. Packed numbers are converted to bfloat16: exactly for mxfp4, rounded for other formats.
class WeightStrips {
 public:
  explicit WeightStrips(const Weight& weight) : weight_(weight), strips_(2, weight.columns) {
    if (weight.format->is_dense()) return;
    for (auto& strip : packed_strips_) strip = strip_of(weight);
  }

  // Whether rows must be given to read_transposed() before their strips are read, at best kTransposed of them.
  static bool transposed(const Weight& weight) {
    return weight.format->is_dense() && weight.row == 1 && weight.column != 1;
  }
  static constexpr int64_t kTransposed = 128;
  void read_transposed(int64_t which, int64_t expert, int64_t first, int64_t count, int64_t step) {
    transposed_[which].read(weight_, expert, first, count, step);
  }

  // Selects strip `which`, and the one that will probably be read next in its place.
  void read(int64_t which, const StripRows& rows, const StripRows& next) {
    for (const TransposedRows& some : transposed_) {
      if (some.contain(rows)) {
        strips_.tiles[which] = some.strip(rows.first);
        return;
      }
    }
    if (packed()) return packed_strips_[which]->start(rows, next);
    const auto* data = elements<at::BFloat16>(weight_.data) + weight_.place(rows.expert, rows.first);
    strips_.read(which, {data, rows.step * weight_.row, weight_.column, rows.count, weight_.columns});
  }

  // Calls use(group, c0, c1) for each group of tokens with its products with the two strips.
  template <class Use>
  void multiply(const TokenGroups& groups, Use&& use) {
    for (int64_t g = 0; g < groups.count(); g += kGroups) {
      const TokenGroups some = groups.subrange(g, kGroups);
      if (g == 0 && packed())
        unpack_and_multiply(some, groups.count() > kGroups);
      else
        products_.multiply(strips_, some);
      for (int64_t i = 0; i < some.count(); ++i) use(g + i, products_.c[0][i], products_.c[1][i]);
    }
  }

 private:
  static constexpr int64_t kAtOnce = 2;  // blocks

  bool packed() const { return !weight_.format->is_dense(); }

  // Unpacks two blocks of a strip while AMX multiplies the two blocks before them by the first groups of tokens. With
  // two strips at a time, the upper one is unpacked at even blocks and the lower one at odd ones. Blocks that no later
  // group needs stay in the L1 cache. (A few rows of the blocks at a time took 1.05 to 1.1 of the time in most formats,
  // on an Emerald Rapids.)
  void unpack_and_multiply(const TokenGroups& groups, bool more) {
    if (!amx_available()) {
      for (int w = 0; w < 2; ++w) unpack_and_multiply(w, groups, more);
      return;
    }
    const bool in_pairs = Products::in_pairs(groups.count());
    const auto ahead = [&](int64_t which) {
      const int64_t ring = more || groups.count() == kGroups ? ~int64_t{0} : 2 * kAtOnce - 1;
      at::BFloat16* panel = strips_.panel(which);
      strips_.tiles[which].ring = ring;
      const auto unpack = [this, which, ring, panel](int64_t block) {
        const int64_t first = block * kDepth, columns = std::min(kAtOnce * kDepth, weight_.columns - first);
        if (columns > 0) packed_strips_[which]->pack(first, columns, panel + (block & ring) * kTileSize);
      };
      unpack(0);
      return [unpack, turn = in_pairs ? which : 0](int64_t block) {
        if (block % kAtOnce == turn) unpack(block - turn + kAtOnce);
      };
    };
    products_.multiply(strips_, groups, ahead(0), ahead(1));
  }

  // Without AMX, a strip is unpacked during its product with the first two groups.
  void unpack_and_multiply(int64_t which, const TokenGroups& groups, bool more) {
    PackedStrip& strip = *packed_strips_[which];
    at::BFloat16* panel = strips_.panel(which);
    WeightTiles& tiles = strips_.tiles[which];
    float(*c)[kTile][kTile] = products_.c[which];
    const bool half = groups.count() == 3 && groups.tokens <= 2 * kTile + kTile / 2;
    const int64_t some = half ? 3 : 2;
    tiles.ring = more || groups.count() > some ? ~int64_t{0} : 2 * kAtOnce - 1;
    if (groups.tokens > kTile / 2 && strip.multiply(tiles, groups.subrange(0, some), c)) {
      if (groups.count() > some) {
        multiply_strip(tiles, groups.subrange(some, kGroups - some), strips_.blocks(), c + some, false);
      }
      return;
    }
    tiles.ring = -1;
    strip.pack(0, weight_.columns, panel);
    multiply_strip(tiles, groups, strips_.blocks(), c, false);
  }

  const Weight& weight_;
  std::unique_ptr<PackedStrip> packed_strips_[2];
  TransposedRows transposed_[2];
  Strips strips_;
  Products products_;
};

// Transposes the products of two strips with a group: to[n] has the results of token n for the 32 rows.
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
