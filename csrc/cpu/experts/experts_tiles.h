// `experts` in bfloat16, with the products of x86/tiles.h.
//
// In a product, the results of neighbouring tokens are contiguous, so interleaving two rows of `inner` gives the layout
// of a right operand for pass 2. `inner` is rounded to bfloat16; sums are float.
#pragma once
#include "cpu/experts/experts.h"
#include "cpu/x86/weight_strips.h"

namespace moe_metal {

static_assert(kRows == 2 * kTile && kRows == kDepth);

// The slots of each expert in groups of 16, and the right operands of the groups for both passes.
struct TokenTiles {
  std::vector<int64_t> first;  // the first group of each expert, and the end of the last
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
  // The groups of one expert, of x or of inner.
  TokenGroups groups(const Tensor& of, const Slots& slots, int64_t which) const {
    const int64_t size = of.size(1);
    return {elements<at::BFloat16>(of) + first[which] * size, size, slots.begin[which + 1] - slots.begin[which]};
  }
};

inline void pack_all_tokens(const Experts& call, const Slots& slots, const TokenTiles& tokens) {
  const at::BFloat16* x = elements<at::BFloat16>(call.x);
  parallel_work_queue(slots.used(), [&](auto next_item) {
    for (int64_t which = next_item(); which < slots.used(); which = next_item()) {
      at::BFloat16* to = tokens.x.mutable_data_ptr<at::BFloat16>() + tokens.first[which] * tokens.x_size;
      for (int64_t at = slots.begin[which]; at < slots.begin[which + 1]; at += kTile, to += tokens.x_size) {
        const int64_t* group_slots = slots.order.data() + at;
        pack_right([&](int64_t i) { return x + group_slots[i] / call.K * call.H; }, slots.begin[which + 1] - at, call.H,
                   to);
      }
    }
  });
}

// Interleaves two rows of floats as pairs of bfloat16, rounded to nearest even; NaN stays NaN.
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

// Pass 1 for kRows rows of one expert.
class GateUpTiles {
 public:
  GateUpTiles(const Experts& call, const Slots& slots, const TokenTiles& tokens)
      : call_(call), slots_(slots), tokens_(tokens), weight_(call.gate_up) {}

  // The rows of a work item.
  static int64_t rows_of_item(const Experts& call) {
    return WeightStrips::transposed(call.gate_up) ? WeightStrips::kTransposed / 2 : kRows;
  }

  void operator()(int64_t which, int64_t first) {
    const int64_t end = std::min(first + rows_of_item(call_), call_.I);
    if (WeightStrips::transposed(call_.gate_up)) read_transposed(slots_.experts[which], first, end - first);
    for (int64_t row = first; row < end; row += kRows) rows(which, row);
  }

 private:
  void read_transposed(int64_t expert, int64_t row, int64_t count) {
    const int64_t first = row * call_.row_stride;
    if (call_.row_stride == 2) return weight_.read_transposed(0, expert, first, 2 * count, 2);
    weight_.read_transposed(0, expert, first, count, 1);
    weight_.read_transposed(1, expert, first + call_.up_row_offset, count, 1);
  }
  void rows(int64_t which, int64_t row) {
    const int64_t expert = slots_.experts[which], first = tokens_.first[which];
    const GateUpBias bias(call_, expert, row, std::min(kRows, call_.I - row));
    for (int64_t half = 0; half < kRows; half += kTile) {
      const StripRows rows = strip(which, row + half), next = after(which, row + half);
      weight_.read(0, rows, next);
      weight_.read(1, up_of(rows), up_of(next));
      at::BFloat16* to = tokens_.inner.mutable_data_ptr<at::BFloat16>() + first * tokens_.inner_size + row * kTile;
      weight_.multiply(tokens_.groups(tokens_.x, slots_, which), [&](int64_t g, const auto& gate, const auto& up) {
        activate(gate, up, bias.gate + half, bias.up + half, to + g * tokens_.inner_size + half * kTile);
      });
    }
  }
  StripRows strip(int64_t which, int64_t row) const {
    return {slots_.experts[which], row * call_.row_stride, call_.row_stride,
            std::clamp<int64_t>(call_.I - row, 0, kTile)};
  }
  StripRows after(int64_t which, int64_t row) const {
    if (row + kTile < call_.I) return strip(which, row + kTile);
    return which + 1 < slots_.used() ? strip(which + 1, 0) : StripRows();
  }
  StripRows up_of(StripRows gate) const {
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
    const int64_t end = std::min(first + size_, call_.H);
    for (int64_t which = 0; which < slots_.used(); ++which) {
      if (WeightStrips::transposed(call_.down)) {
        weight_.read_transposed(0, slots_.experts[which], first, end - first, 1);
      }
      for (int64_t row = first; row < end; row += kRows) rows_of_expert(which, row, first);
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
    const int64_t begin = slots_.begin[which], end = slots_.begin[which + 1];
    weight_.multiply(tokens_.groups(tokens_.inner, slots_, which),
                     [&](int64_t g, const auto& upper, const auto& lower) {
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
    by_tokens(upper, lower, values);
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
  const int64_t rows = GateUpTiles::rows_of_item(call), blocks = at::divup(call.I, rows), items = slots.used() * blocks;
  parallel_work_queue(items, [&](auto next_item) {
    const TileShapes shapes;
    GateUpTiles work(call, slots, tokens);
    for (int64_t item = next_item(); item < items; item = next_item()) work(item / blocks, item % blocks * rows);
  });
  const int64_t size = output_block(call), outputs = at::divup(call.H, size);
  parallel_work_queue(outputs, [&](auto next_item) {
    const TileShapes shapes;
    DownTiles work(call, slots, tokens, size);
    for (int64_t item = next_item(); item < outputs; item = next_item()) work(item * size);
  });
}

}  // namespace moe_metal
