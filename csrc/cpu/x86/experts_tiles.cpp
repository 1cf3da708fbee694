// `experts` in bfloat16, with the products of x86/tiles.h.
//
// In a product, the results of neighbouring tokens are contiguous, so interleaving two rows of `inner` gives the layout
// of a right operand for pass 2. `inner` is rounded to bfloat16; sums are float.
#include "cpu/experts/experts.h"
#include "cpu/processor_ways.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/weight_tile_rows.h"

namespace moe_metal {
namespace {

static_assert(kRows == 2 * kTile && kRows == kDepth);

// The slots of each expert in tiles of 16, as right operands: `inner` for all experts, and x for some experts at a
// time, a portion. The next portion uses the memory again while it is in the L3 cache, so the operating system need not
// clear memory for x of all experts in each call.
class ExpertTokens {
 public:
  ExpertTokens(const Experts& call, const Slots& slots) : call_(call), slots_(slots) {
    for (int64_t which = 0; which < slots.used(); ++which) {
      first_.push_back(first_.back() + at::divup(tokens_of(which), kTile));
    }
    const int64_t x_size = at::divup(call.H, kDepth) * kTileSize, inner_size = at::divup(call.I, kDepth) * kTileSize;
    constexpr int64_t kBytesOfThread = 4 << 20;
    const int64_t most = at::get_num_threads() * kBytesOfThread / (2 * x_size);  // tiles of a portion
    int64_t tiles = 0;  // of the largest portion; an expert may have more than `most`
    for (int64_t which = 0; which < slots.used(); ++which) {
      if (which > 0 && first_[which + 1] - first_[portions_.back()] > most) portions_.push_back(which);
      tiles = std::max(tiles, first_[which + 1] - first_[portions_.back()]);
    }
    portions_.push_back(slots.used());
    x_ = empty({tiles, x_size}, call.x.options());
    inner_ = empty({first_.back(), inner_size}, call.x.options());
  }

  // The first expert of each portion, and the end of the last.
  const std::vector<int64_t>& portions() const { return portions_; }
  // Prepares x of a portion, which x() returns from then on.
  void pack(int64_t begin, int64_t end) {
    x_begin_ = first_[begin];
    const int64_t tiles = first_[end] - x_begin_;
    parallel_work_queue(tiles, [&](auto next_item) {
      for (int64_t item = next_item(); item < tiles; item = next_item()) pack_tile(x_begin_ + item);
    });
  }

  // The tiles of one expert.
  TokenTiles x(int64_t which) const { return tiles(x_, first_[which] - x_begin_, which); }
  TokenTiles inner(int64_t which) const { return tiles(inner_, first_[which], which); }
  // A tile of inner, to be written.
  at::BFloat16* inner_of(int64_t which, int64_t tile) const {
    return inner_.mutable_data_ptr<at::BFloat16>() + (first_[which] + tile) * inner_.size(1);
  }

 private:
  int64_t tokens_of(int64_t which) const { return slots_.begin[which + 1] - slots_.begin[which]; }
  TokenTiles tiles(const Tensor& of, int64_t first, int64_t which) const {
    return {elements<at::BFloat16>(of) + first * of.size(1), of.size(1), tokens_of(which)};
  }
  void pack_tile(int64_t tile) const {
    const int64_t which = std::upper_bound(first_.begin(), first_.end(), tile) - first_.begin() - 1;
    const int64_t at = slots_.begin[which] + (tile - first_[which]) * kTile;
    const auto* x = elements<at::BFloat16>(call_.x);
    const auto row = [&](int64_t i) { return x + slots_.order[at + i] / call_.K * call_.H; };
    at::BFloat16* to = x_.mutable_data_ptr<at::BFloat16>() + (tile - x_begin_) * x_.size(1);
    pack_right(row, slots_.begin[which + 1] - at, call_.H, to);
  }

  const Experts& call_;
  const Slots& slots_;
  std::vector<int64_t> first_ = {0};  // the first tile of each expert, and the end of the last
  std::vector<int64_t> portions_ = {0};
  int64_t x_begin_ = 0;  // the first tile of x
  Tensor x_, inner_;
};

// Interleaves two rows of floats as pairs of bfloat16, rounded to nearest even; NaN stays NaN.
__m512i pairs(const Vec& even, const Vec& odd) {
  const auto rounded = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x),
                  last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  };
  const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), high);
}

// Pass 1 for some rows of one expert.
class GateUpTiles {
 public:
  GateUpTiles(const Experts& call, const Slots& slots, const ExpertTokens& tokens)
      : call_(call), slots_(slots), tokens_(tokens), rows_(rows_of_item(call)), weight_(call.gate_up, rows_ / kTile) {}

  // The rows of gate, and of up, of a work item.
  static int64_t rows_of_item(const Experts& call) {
    return WeightTileRows::transposed(call.gate_up) ? WeightTileRows::kTransposed / 2 : kRows;
  }

  void operator()(int64_t which, int64_t first) {
    const int64_t expert = slots_.experts[which], end = std::min(first + rows_, call_.I);
    if (WeightTileRows::transposed(call_.gate_up)) read_transposed(expert, first, end - first);
    bias_.clear();
    int64_t tile_rows = 0;
    for (int64_t row = first; row < end; row += kRows) {
      bias_.emplace_back(call_, expert, row, std::min(kRows, call_.I - row));
      for (int64_t half = 0; half < kRows; half += kTile) {
        const TileRowRange rows = tile_row(which, row + half), next = after(which, row + half);
        weight_.read(tile_rows++, rows, next);
        weight_.read(tile_rows++, up_of(rows), up_of(next));
      }
    }
    weight_.multiply(tile_rows / 2, tokens_.x(which), [&](int64_t pair, int64_t g, const auto& gate, const auto& up) {
      const GateUpBias& bias = bias_[pair / 2];
      const int64_t half = pair % 2 * kTile;
      activate(gate, up, bias.gate + half, bias.up + half, tokens_.inner_of(which, g) + (first + pair * kTile) * kTile);
    });
  }

 private:
  void read_transposed(int64_t expert, int64_t row, int64_t count) {
    const int64_t first = row * call_.row_stride;
    if (call_.row_stride == 2) return weight_.read_transposed(0, expert, first, 2 * count, 2);
    weight_.read_transposed(0, expert, first, count, 1);
    weight_.read_transposed(1, expert, first + call_.up_row_offset, count, 1);
  }
  TileRowRange tile_row(int64_t which, int64_t row) const {
    return {slots_.experts[which], row * call_.row_stride, call_.row_stride,
            std::clamp<int64_t>(call_.I - row, 0, kTile)};
  }
  TileRowRange after(int64_t which, int64_t row) const {
    if (row + kTile < call_.I) return tile_row(which, row + kTile);
    return which + 1 < slots_.used() ? tile_row(which + 1, 0) : TileRowRange();
  }
  TileRowRange up_of(TileRowRange gate) const {
    gate.first += call_.up_row_offset;
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
  const ExpertTokens& tokens_;
  const int64_t rows_;
  WeightTileRows weight_;
  std::vector<GateUpBias> bias_;  // of each kRows rows
};

// Pass 2 for one item of the output.
class DownTiles {
 public:
  DownTiles(const Experts& call, const Slots& slots, const ExpertTokens& tokens, int64_t size)
      : call_(call),
        slots_(slots),
        tokens_(tokens),
        size_(size),
        weight_(call.down, size / kRows),
        output_(call, size) {}

  void operator()(int64_t first) {
    output_.start(first);
    const int64_t end = std::min(first + size_, call_.H);
    for (int64_t which = 0; which < slots_.used(); ++which) rows_of_expert(which, first, end);
    output_.finish();
  }

 private:
  void rows_of_expert(int64_t which, int64_t first, int64_t end) {
    const int64_t expert = slots_.experts[which];
    if (WeightTileRows::transposed(call_.down)) weight_.read_transposed(0, expert, first, end - first, 1);
    int64_t tile_rows = 0;
    for (int64_t row = first; row < end; row += kRows) {
      for (int64_t half = 0; half < kRows; half += kTile) {
        const TileRowRange next = row + kRows < end           ? tile_row(which, row + kRows + half)
                                  : which + 1 < slots_.used() ? tile_row(which + 1, first + half)
                                                              : TileRowRange();
        weight_.read(tile_rows++, tile_row(which, row + half), next);
      }
    }
    const int64_t begin = slots_.begin[which], tokens = slots_.begin[which + 1] - begin;
    weight_.multiply(tile_rows / 2, tokens_.inner(which),
                     [&](int64_t pair, int64_t g, const auto& upper, const auto& lower) {
                       output_.expect(expert, first + pair * kRows);
                       add(upper, lower, slots_.order.data() + begin + g * kTile, std::min(kTile, tokens - g * kTile));
                     });
  }

  TileRowRange tile_row(int64_t which, int64_t row) const {
    return {slots_.experts[which], row, 1, std::clamp<int64_t>(call_.H - row, 0, kTile)};
  }

  void add(const float (&upper)[kTile][kTile], const float (&lower)[kTile][kTile], const int64_t* slots,
           int64_t count) {
    alignas(64) float values[kTile][kRows];  // token by token
    by_tokens(upper, lower, values);
    for (int64_t n = 0; n < count; ++n) output_.add(slots[n], values[n]);
  }

  const Experts& call_;
  const Slots& slots_;
  const ExpertTokens& tokens_;
  const int64_t size_;
  WeightTileRows weight_;
  OutputItem<at::BFloat16> output_;
};

bool experts_by_tiles(const Experts& call, const Slots& slots) {
  const bool fit = experts_fit_tiles(call, static_cast<int64_t>(slots.order.size()), slots.used());
  if (!fit || !inner_may_be_rounded(call)) return false;
  ExpertTokens tokens(call, slots);
  const int64_t rows = GateUpTiles::rows_of_item(call), of_expert = at::divup(call.I, rows);
  for (size_t portion = 0; portion + 1 < tokens.portions().size(); ++portion) {
    const int64_t begin = tokens.portions()[portion], end = tokens.portions()[portion + 1],
                  items = (end - begin) * of_expert;
    tokens.pack(begin, end);
    parallel_work_queue(items, [&](auto next_item) {
      const TileShapes shapes;
      GateUpTiles work(call, slots, tokens);
      for (int64_t item = next_item(); item < items; item = next_item()) {
        work(begin + item / of_expert, item % of_expert * rows);
      }
    });
  }
  const int64_t size = output_columns(call), outputs = at::divup(call.H, size);
  parallel_work_queue(outputs, [&](auto next_item) {
    const TileShapes shapes;
    DownTiles work(call, slots, tokens, size);
    for (int64_t item = next_item(); item < outputs; item = next_item()) work(item * size);
  });
  return true;
}

[[maybe_unused]] const bool kOffered = (processor_ways().experts = experts_by_tiles, true);

}  // namespace
}  // namespace moe_metal
