// `experts` in bfloat16: the products of x86/tiles.h.
//
// A product comes out with the tokens side by side, so two rows of `inner` interleave into just the arrangement that
// pass 2 wants. `inner` is rounded to bfloat16; sums are float.
#pragma once
#include "cpu/experts/experts.h"
#include "cpu/weights/weight_rows.h"
#include "cpu/x86/tiles.h"
#include "kept_memory.h"

namespace moe_metal {

static_assert(kRows == 2 * kTile && kRows == kDepth);

// The slots of each expert in groups of 16, and what the groups bring to each pass, as right operands.
struct TokenTiles {
  std::vector<int64_t> first;  // of each expert's groups, and one last end
  int64_t x_size, inner_size;  // of a group
  Tensor x, inner;

  TokenTiles(const Experts& call, const Slots& slots) : first(1, 0) {
    for (int64_t which = 0; which < slots.used(); ++which) {
      first.push_back(first.back() + at::divup(slots.begin[which + 1] - slots.begin[which], kTile));
    }
    x_size = at::divup(call.H, kDepth) * kTileSize;
    inner_size = at::divup(call.I, kDepth) * kTileSize;
    x = empty({first.back(), x_size}, call.x.options());
    inner = empty({first.back(), inner_size}, call.x.options());
  }
};

inline void pack_all_tokens(const Experts& call, const Slots& slots, const TokenTiles& tokens) {
  const at::BFloat16* x = elements<at::BFloat16>(call.x);
  share(slots.used(), [&](auto take) {
    for (int64_t which = take(); which < slots.used(); which = take()) {
      at::BFloat16* to = tokens.x.mutable_data_ptr<at::BFloat16>() + tokens.first[which] * tokens.x_size;
      for (int64_t at = slots.begin[which]; at < slots.begin[which + 1]; at += kTile, to += tokens.x_size) {
        const int64_t* group_slots = slots.order.data() + at;
        pack_right([&](int64_t i) { return x + group_slots[i] / call.K * call.H; }, slots.begin[which + 1] - at, call.H,
                   to);
      }
    }
  });
}

// Two rows of floats as pairs of bfloat16, rounded to nearest even; NaN stays NaN.
inline __m512i pairs(const Vec& even, const Vec& odd) {
  const auto rounded = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x),
                  last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  };
  const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), high);
}

// Two strips of a weight. Packed numbers become bfloat16 on their way: exactly those of mxfp4, others rounded.
class WeightStrips {
 public:
  explicit WeightStrips(const Weight& weight) : weight_(weight), strips_(2, weight.columns) {
    if (weight.format->is_dense()) return;
    for (auto& strip : packed_strips_) strip = strip_of(weight);
  }

  // A strip, and the one that is most likely read next in its place.
  void read(int64_t which, const StripRows& rows, const StripRows& next) {
    if (packed()) return packed_strips_[which]->start(rows, next);
    const auto* data = elements<at::BFloat16>(weight_.data) + weight_.place(rows.expert, rows.first);
    strips_.read(which, {data, rows.step * weight_.row, weight_.column, rows.count, weight_.columns});
  }

  // use(group, c0, c1) for each group of tokens: its products with the two strips.
  template <class Use>
  void multiply(const at::BFloat16* tokens, int64_t size, int64_t groups, Use&& use) {
    const bool ahead = packed() && amx_available();
    for (int w = 0; w < 2 && packed() && !ahead; ++w)
      packed_strips_[w]->pack(0, kTile, 0, weight_.columns, strips_.panel(w));
    for (int64_t g = 0; g < groups; g += kGroups) {
      const int64_t count = std::min(kGroups, groups - g);
      if (g == 0 && ahead)
        unpack_and_multiply(tokens, size, count, groups > kGroups);
      else
        products_.multiply(strips_, tokens + g * size, size, count);
      for (int64_t i = 0; i < count; ++i) use(g + i, products_.c[0][i], products_.c[1][i]);
    }
  }

 private:
  static constexpr int64_t kAtOnce = 2, kSome = kTile / kParts;  // blocks, and rows of them

  bool packed() const { return !weight_.format->is_dense(); }

  // Two blocks are unpacked while AMX multiplies the two before them with the first groups of tokens, four rows at a
  // time: on a Sapphire Rapids 8 bits take 0.88 of the time of all rows at once. Of two strips at a time the upper one
  // has the even blocks and the lower one the odd ones. What no other group needs never leaves the first cache.
  void unpack_and_multiply(const at::BFloat16* tokens, int64_t size, int64_t groups, bool more) {
    const bool in_pairs = Products::in_pairs(groups);
    const auto ahead = [&](int64_t which) {
      const int64_t ring = more ? ~int64_t{0} : 2 * kAtOnce - 1;
      at::BFloat16* panel = strips_.panel(which);
      strips_.tiles[which].ring = ring;
      const auto make = [this, which, ring, panel](int64_t block, int64_t row, int64_t rows) {
        const int64_t first = block * kDepth, columns = std::min(kAtOnce * kDepth, weight_.columns - first);
        if (columns > 0) packed_strips_[which]->pack(row, rows, first, columns, panel + (block & ring) * kTileSize);
      };
      make(0, 0, kTile);
      return [make, which, in_pairs](int64_t block, int64_t part) {
        const int64_t odd = block % kAtOnce, next = block - odd + kAtOnce;
        if (in_pairs ? odd == which : part % kAtOnce == 0)
          make(next, (in_pairs ? part : odd * kAtOnce + part / kAtOnce) * kSome, kSome);
      };
    };
    products_.multiply(strips_, tokens, size, groups, ahead(0), ahead(1));
  }

  const Weight& weight_;
  std::unique_ptr<PackedStrip> packed_strips_[2];
  Strips strips_;
  Products products_;
};

// Pass 1 for kRows rows of one expert.
class GateUpTiles {
 public:
  GateUpTiles(const Experts& call, const Slots& slots, const TokenTiles& tokens)
      : call_(call), slots_(slots), tokens_(tokens), weight_(call.gate_up) {}

  void operator()(int64_t which, int64_t row) {
    const int64_t expert = slots_.experts[which], first = tokens_.first[which];
    const GateUpBias bias(call_, expert, row, std::min(kRows, call_.I - row));
    for (int64_t half = 0; half < kRows; half += kTile) {
      const StripRows rows = strip(which, row + half), next = after(which, row + half);
      weight_.read(0, rows, next);
      weight_.read(1, up_of(rows), up_of(next));
      at::BFloat16* to = tokens_.inner.mutable_data_ptr<at::BFloat16>() + first * tokens_.inner_size + row * kTile;
      weight_.multiply(elements<at::BFloat16>(tokens_.x) + first * tokens_.x_size, tokens_.x_size,
                       tokens_.first[which + 1] - first, [&](int64_t g, const auto& gate, const auto& up) {
                         activate(gate, up, bias.gate + half, bias.up + half,
                                  to + g * tokens_.inner_size + half * kTile);
                       });
    }
  }

 private:
  StripRows strip(int64_t which, int64_t row) const {
    return {slots_.experts[which], row * call_.step, call_.step, std::clamp<int64_t>(call_.I - row, 0, kTile)};
  }
  StripRows after(int64_t which, int64_t row) const {
    if (row + kTile < call_.I) return strip(which, row + kTile);
    return which + 1 < slots_.used() ? strip(which + 1, 0) : StripRows();
  }
  StripRows up_of(StripRows gate) const {
    gate.first += call_.up;
    return gate;
  }

  void activate(const float (&gate)[kTile][kTile], const float (&up)[kTile][kTile], const float* gate_bias,
                const float* up_bias, at::BFloat16* to) {
    with_activation(call_.params.activation, [&](auto activation) {
      const auto row = [&](int64_t r) {
        return activated<decltype(activation)::value>(Vec::loadu(gate[r]) + Vec(gate_bias[r]),
                                                      Vec::loadu(up[r]) + Vec(up_bias[r]), call_.params);
      };
      for (int64_t r = 0; r < kTile; r += 2) _mm512_storeu_si512(to + r * kTile, pairs(row(r), row(r + 1)));
    });
  }

  const Experts& call_;
  const Slots& slots_;
  const TokenTiles& tokens_;
  WeightStrips weight_;
};

// Pass 2 for one block of the output.
class DownTiles {
 public:
  DownTiles(const Experts& call, const Slots& slots, const TokenTiles& tokens, int64_t size)
      : call_(call), slots_(slots), tokens_(tokens), size_(size), weight_(call.down), output_(call, size) {}

  void operator()(int64_t first) {
    output_.start(first);
    for (int64_t which = 0; which < slots_.used(); ++which) {
      for (int64_t row = first; row < std::min(first + size_, call_.H); row += kRows) rows_of_expert(which, row, first);
    }
    output_.finish();
  }

 private:
  void rows_of_expert(int64_t which, int64_t row, int64_t block) {
    output_.expect(slots_.experts[which], row);
    const bool same = row + kRows < std::min(block + size_, call_.H);
    for (int i = 0; i < 2; ++i) {
      const StripRows next = same                        ? strip(which, row + kRows, i)
                             : which + 1 < slots_.used() ? strip(which + 1, block, i)
                                                         : StripRows();
      weight_.read(i, strip(which, row, i), next);
    }
    const int64_t first = tokens_.first[which], begin = slots_.begin[which], end = slots_.begin[which + 1];
    weight_.multiply(elements<at::BFloat16>(tokens_.inner) + first * tokens_.inner_size, tokens_.inner_size,
                     tokens_.first[which + 1] - first, [&](int64_t g, const auto& upper, const auto& lower) {
                       const int64_t at = begin + g * kTile;
                       add(upper, lower, slots_.order.data() + at, std::min(kTile, end - at));
                     });
  }

  StripRows strip(int64_t which, int64_t row, int64_t i) const {
    const int64_t first = row + i * kTile;
    return {slots_.experts[which], first, 1, std::clamp<int64_t>(call_.H - first, 0, kTile)};
  }

  void add(const float (&upper)[kTile][kTile], const float (&lower)[kTile][kTile], const int64_t* slots,
           int64_t count) {
    alignas(64) float values[kTile][kRows];  // token by token
    for (const auto* half : {&upper, &lower}) {
      __m512i tile[kTile];
      for (int64_t r = 0; r < kTile; ++r) tile[r] = _mm512_loadu_si512((*half)[r]);
      transpose(tile);
      for (int64_t n = 0; n < kTile; ++n) _mm512_store_si512(values[n] + (half == &lower) * kTile, tile[n]);
    }
    for (int64_t n = 0; n < count; ++n) output_.add(slots[n], values[n]);
  }

  const Experts& call_;
  const Slots& slots_;
  const TokenTiles& tokens_;
  const int64_t size_;
  WeightStrips weight_;
  OutputBlock<at::BFloat16> output_;
};

inline void experts_by_tiles(const Experts& call, const Slots& slots) {
  const TokenTiles tokens(call, slots);
  pack_all_tokens(call, slots, tokens);
  const int64_t blocks = at::divup(call.I, kRows), items = slots.used() * blocks;
  share(items, [&](auto take) {
    const TileShapes shapes;
    GateUpTiles work(call, slots, tokens);
    for (int64_t item = take(); item < items; item = take()) work(item / blocks, item % blocks * kRows);
  });
  const int64_t size = output_block(call), outputs = at::divup(call.H, size);
  share(outputs, [&](auto take) {
    const TileShapes shapes;
    DownTiles work(call, slots, tokens, size);
    for (int64_t item = take(); item < outputs; item = take()) work(item * size);
  });
}

}  // namespace moe_metal
