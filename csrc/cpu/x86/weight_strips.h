// The rows of a weight in any format as left operands of the products of x86/tiles.h, for experts and linear.
#pragma once
#include "cpu/weights/weight_rows.h"
#include "cpu/x86/transposed_rows.h"

namespace moe_metal {

// Pairs of strips of a weight. Packed numbers are converted to bfloat16: exactly for mxfp4, rounded for other formats.
class WeightStrips {
 public:
  WeightStrips(const Weight& weight, int64_t pairs) : weight_(weight), strips_(2 * pairs, weight.columns) {
    if (weight.format->is_dense()) return;
    for (int64_t i = 0; i < 2 * pairs; ++i) packed_strips_.push_back({strip_of(weight)});
  }

  // Whether rows must be given to read_transposed() before their strips are read, at best kTransposed of them.
  static bool transposed(const Weight& weight) {
    return weight.format->is_dense() && weight.row == 1 && weight.column != 1;
  }
  static constexpr int64_t kTransposed = 128;

  void read_transposed(int64_t which, int64_t expert, int64_t first, int64_t count, int64_t step) {
    transposed_[which].read(weight_, expert, first, count, step);
  }

  // Selects strip `which`, and the one that will probably be read after it, which is prefetched.
  void read(int64_t which, const StripRows& rows, const StripRows& next) {
    for (const TransposedRows& some : transposed_) {
      if (some.contain(rows)) {
        strips_.tiles[which] = some.strip(rows.first);
        return;
      }
    }
    if (packed()) {
      packed_strips_[which].rows = rows, packed_strips_[which].next = next;
      return;
    }
    const auto* data = elements<at::BFloat16>(weight_.data) + weight_.place(rows.expert, rows.first);
    strips_.read(which, {data, rows.step * weight_.row, weight_.column, rows.count, weight_.columns});
  }

  // Calls use(pair, group, c0, c1) for each group of tokens with its products with the first `pairs` pairs of strips.
  // A few groups are multiplied by all of them, while they are in the L2 cache.
  template <class Use>
  void multiply(int64_t pairs, const TokenGroups& groups, Use&& use) {
    for (int64_t g = 0, count; g < groups.count(); g += count) {
      const bool first = g == 0 && packed();
      count = first ? groups_of_unpacking(groups) : groups_at_once(groups.count() - g);
      const TokenGroups some = groups.subrange(g, count);
      for (int64_t p = 0; p < pairs; ++p) {
        if (first)
          unpack_and_multiply(p, some, groups.count() > count);
        else
          products_.multiply(&strips_.tiles[2 * p], some, strips_.blocks());
        for (int64_t i = 0; i < count; ++i) use(p, g + i, products_.c[0][i], products_.c[1][i]);
      }
    }
  }

 private:
  static constexpr int64_t kAtOnce = 2;  // blocks

  struct Selected {
    std::unique_ptr<PackedStrip> strip;
    StripRows rows, next;
    PackedStrip& start() const {
      strip->start(rows, next);
      return *strip;
    }
  };

  bool packed() const { return !weight_.format->is_dense(); }

  // How many groups are multiplied while a strip is unpacked. Without AMX the sums of three leave no registers for it.
  static int64_t groups_of_unpacking(const TokenGroups& groups) {
    const int64_t count = groups_at_once(groups.count());
    return !amx_available() && groups.tokens > 2 * kTile + kTile / 2 ? 2 : count;
  }

  // Unpacks two blocks of a strip while AMX multiplies the two blocks before them by the first groups of tokens. With
  // two strips at a time, the upper one is unpacked at even blocks and the lower one at odd ones. Blocks that no later
  // group needs stay in the L1 cache. (A few rows of the blocks at a time took 1.05 to 1.1 of the time in most formats,
  // on an Emerald Rapids.)
  void unpack_and_multiply(int64_t pair, const TokenGroups& groups, bool more) {
    if (!amx_available()) {
      for (int w = 0; w < 2; ++w) unpack_and_multiply_strip(2 * pair + w, groups, more, products_.c[w]);
      return;
    }
    const bool in_pairs = Products::in_pairs(groups.count());
    const auto ahead = [&](int64_t w) {
      const int64_t which = 2 * pair + w;
      const int64_t ring = more || groups.count() == kGroups ? ~int64_t{0} : 2 * kAtOnce - 1;
      at::BFloat16* panel = strips_.panel(which, more ? which : w);
      strips_.tiles[which].ring = ring;
      const auto unpack = [this, &strip = packed_strips_[which].start(), ring, panel](int64_t block) {
        const int64_t first = block * kDepth, columns = std::min(kAtOnce * kDepth, weight_.columns - first);
        if (columns > 0) strip.pack(first, columns, panel + (block & ring) * kTileSize);
      };
      unpack(0);
      return [unpack, turn = in_pairs ? w : 0](int64_t block) {
        if (block % kAtOnce == turn) unpack(block - turn + kAtOnce);
      };
    };
    products_.multiply(&strips_.tiles[2 * pair], groups, strips_.blocks(), ahead(0), ahead(1));
  }

  // Without AMX, a strip is unpacked during its product with the first groups.
  void unpack_and_multiply_strip(int64_t which, const TokenGroups& groups, bool more, float (*c)[kTile][kTile]) {
    PackedStrip& strip = packed_strips_[which].start();
    // Memory of a strip that no later group needs is used again for the next, while it is in the L1 cache.
    at::BFloat16* panel = strips_.panel(which, more ? which : which % 2);
    WeightTiles& tiles = strips_.tiles[which];
    tiles.ring = more ? ~int64_t{0} : 2 * kAtOnce - 1;
    if (groups.tokens > kTile / 2 && strip.multiply(tiles, groups, c)) return;
    tiles.ring = -1;
    strip.pack(0, weight_.columns, panel);
    multiply_strip(tiles, groups, strips_.blocks(), c, false);
  }

  const Weight& weight_;
  std::vector<Selected> packed_strips_;
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
