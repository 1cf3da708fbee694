// Rows of packed weights, and their products: one template for all formats, whose readers are in formats/*.h. Every
// format is compiled in one of the files *_rows.cpp, side by side. A reader has
//   kColumns, kBytes      of the bytes that rows are made of
//   kOwnScales            whether those hold the scales, too: scales() reads them then
//   kScalesAreRare        whether many columns of many rows share one
//   kOffset               whether a value is scale * code + offset, and else scale * code
//   operator()            the codes of a vector of a row's columns, as floats
//   quick                 the same in an order of its own, which codes.in_order() gives to the tokens' numbers, and in
//                         units of kUnit; with an offset, kMiddle is the middle of the codes
//   Dots, Tiles           products of few tokens, and of some, that the processor may have instructions for
#pragma once
#include <bit>

#include "group_dots.h"
#include "rounded.h"
#include "row_scales.h"
#include "weights.h"

namespace moe_metal {
namespace {

// A weight's rows, and the scales of some of them.
template <class Read>
class PackedWeightRows {
 public:
  explicit PackedWeightRows(const Weight& weight) : weight_(weight), scales_(weight) {
    some_.columns = weight.columns;
    some_.row = weight.row;
    some_.shift = std::countr_zero(static_cast<uint64_t>(weight.group));
    some_.groups = scales_.groups();
    // Scales within the data are read for some rows at once, before their codes.
    if (Read::kOwnScales) some_.distance = rows_at_once() * weight.row;
  }

  // Until the next call: `count` of these rows from `skip` on. The others, and then `next`, are read later.
  const Packed<Read>& some(const RowRange& rows, int64_t skip, int64_t count, const uint8_t* next) {
    some_.rows = count;
    some_.data = place(rows.expert, rows.first + skip);
    some_.left = rows.count - skip;
    some_.next = next;
    scales_.read(rows.expert, rows.first + skip, some_);
    return some_;
  }
  // Where the next rows lie, whose first scales come to the caches; those that follow where none are named.
  const uint8_t* prefetched(const RowRange& rows, const RowRange& next) const {
    if (next.count == 0) return place(rows.expert, rows.first + rows.count);
    scales_.prefetch(next.expert, next.first, next.count);
    return place(next.expert, next.first);
  }
  static constexpr int64_t kMost = 16;  // rows at once
  // So few that their scales stay in the first cache, and a multiple of those that are multiplied together.
  int64_t rows_at_once() const {
    const int64_t numbers = scales_.groups() * (Read::kOffset ? 2 : 1);
    return std::clamp<int64_t>(1024 / std::max<int64_t>(numbers, 1), 8, kMost) / 4 * 4;
  }
  const Weight& weight() const { return weight_; }
  const ScaledRows& shape() const { return some_; }

 private:
  const uint8_t* place(int64_t expert, int64_t row) const {
    return static_cast<const uint8_t*>(weight_.data.const_data_ptr()) + weight_.place(expert, row);
  }

  const Weight& weight_;
  Scales<Read> scales_;
  Packed<Read> some_;
};

template <class Read>
class PackedRows final : public WeightRows {
 public:
  PackedRows(const Weight& weight, bool bfloat16) : rows_(weight), bfloat16_(bfloat16) {}

  void product(const RowRange& rows, const RowRange& next, const Tokens& tokens, std::optional<Panel>& panel) override {
    const uint8_t* after = rows_.prefetched(rows, next);
    if (panel) return panel->product(rows_.some(rows, 0, rows.count, after), tokens);
    out_.resize(tokens.count);
    const bool tiles = bfloat16_ && Read::Tiles::takes(rows_.shape(), tokens.count);
    const int64_t at_once = tiles ? rows_.kMost : rows_.rows_at_once();
    for (int64_t first = 0; first < rows.count; first += at_once) {
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      some_rows(rows_.some(rows, first, std::min(at_once, rows.count - first), after),
                {tokens.x, out_.data(), tokens.count});
    }
  }
  void dequantize(int64_t expert, int64_t row, float* to) override {
    const Packed<Read>& one = rows_.some({expert, row, 1}, 0, 1, nullptr);
    const auto some = one.some(0);
    for_each_vector(one.columns, [&](int64_t c, auto count) { store(to + c, some.load(0, c, count), count); });
  }

 private:
  void some_rows(const Packed<Read>& rows, const Tokens& tokens) {
    if (!scaled_last(rows, tokens)) return product_by_rows(rows, tokens);
    // What has no digits comes to NaN there, and a group may have an infinite sum before its scale: once more, then,
    // with each number scaled.
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!all_finite(tokens.out[n], rows.rows)) product_by_rows(rows, {tokens.x + n, tokens.out + n, 1});
    }
  }
  // Products that are summed before they are scaled. -> whether there is one
  bool scaled_last(const Packed<Read>& rows, const Tokens& tokens) {
    if (bfloat16_ && rows.rows % Read::Tiles::kRowsAtOnce == 0 && Read::Tiles::takes(rows, tokens.count)) {
      tiles_(rows, tokens);
      return true;
    }
    if (bfloat16_ && Read::Dots::takes(rows, tokens.count)) {
      dots_(rows, tokens);
      return true;
    }
    if constexpr (kLanes >= 8) {
      const int64_t group = rows_.weight().group;
      if (group >= 2 * kLanes && rows.columns % group == 0 && tokens.count <= 2) {
        tokens.count == 1 ? by_groups_.template operator()<1>(rows, tokens)
                          : by_groups_.template operator()<2>(rows, tokens);
        return true;
      }
    }
    return false;
  }

  PackedWeightRows<Read> rows_;
  const bool bfloat16_;  // as rows_of() has it
  typename Read::Tiles tiles_;
  typename Read::Dots dots_;
  GroupDots<Read> by_groups_;
  std::vector<float*> out_;
};

#ifdef MOE_METAL_AMX
template <class Read>
class PackedStripRows final : public PackedStrip {
 public:
  explicit PackedStripRows(const Weight& weight) : rows_(weight) {}

  void start(const StripRows& strip, const StripRows& next) override {
    const RowRange rows = {strip.expert, strip.first, strip.count > 0 ? strip.span() : 0};
    next_ = rows_.prefetched(rows, {next.expert, next.first, next.count > 0 ? next.span() : 0});
    some_ = &rows_.some(rows, 0, rows.count, next_);
    strip_ = strip;
    row_ = strip.step * some_->row;
    groups_ = strip.step * some_->groups;
    in_a_run_ = row_ == some_->bytes(some_->columns);
  }
  [[MOE_METAL_BF16]] void pack(int64_t row, int64_t rows, int64_t first, int64_t columns, at::BFloat16* to) override {
    const int64_t end = first + columns, group = rows_.weight().group;
    const bool whole = strip_.count == kTile && group >= kDepth;
    while (whole && first + kDepth <= end) {
      if (first + 2 * kDepth <= end && first >> some_->shift == (first + kDepth) >> some_->shift) {
        pack_whole<2>(row, rows, first, to);
        first += 2 * kDepth, to += 2 * kTileSize;
      } else {
        pack_whole<1>(row, rows, first, to);
        first += kDepth, to += kTileSize;
      }
    }
    const bool narrow = strip_.count == kTile && group == kLanes;
    for (; narrow && first + kDepth <= end; first += kDepth, to += kTileSize) pack_narrow(row, rows, first, to);
    if (first < end) pack_part(row, rows, first, end, to);
  }

 private:
  // Some rows of N blocks that share their scales. The next strip is prefetched in the order in which it lies in
  // memory, whatever rows these are: on a Sapphire Rapids the same bytes come 8 to 10 % faster than row by row.
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void pack_whole(int64_t row, int64_t rows, int64_t column,
                                                                at::BFloat16* to) {
    const int64_t bytes = row_, groups = groups_, group = row * groups + (column >> some_->shift);
    const int64_t begin = some_->bytes(column), further = in_a_run_ ? some_->bytes(N * kDepth) : bytes;
    const uint8_t* from = some_->data + row * bytes;
    const uint8_t* next = next_ + row * further + (in_a_run_ ? kTile * begin : begin);
    const float *scale = some_->scales + group, *offset = Read::kOffset ? some_->offsets + group : scale;
    Rounded<Read> rounded = rounded_;  // which no store below can change
    to += row * kDepth;
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_prefetch(next, 0, 2);
      rounded.set(some_->read, *scale, *offset);
      rounded.template write<N>(some_->read, from, column, to);
      from += bytes, next += further, scale += groups, offset += groups, to += kDepth;
    }
    rounded.keep(rounded_);
  }
  // The same where each vector has a scale of its own.
  [[MOE_METAL_BF16]] void pack_narrow(int64_t row, int64_t rows, int64_t column, at::BFloat16* to) const {
    const auto from = some_->some(0);
    for (int64_t r = row; r < row + rows; ++r) {
      const int64_t at = r * strip_.step;
      __builtin_prefetch(next_ + at * some_->row + some_->bytes(column), 0, 2);
      const Vec low = from.load(at, column, Whole()), high = from.load(at, column + kLanes, Whole());
      _mm512_storeu_si512(to + r * kDepth, both(low, high));
    }
  }
  [[MOE_METAL_BF16, gnu::noinline]] void pack_part(int64_t row, int64_t rows, int64_t first, int64_t end,
                                                   at::BFloat16* to) const {
    for (; first < end; first += kDepth, to += kTileSize) {
      for (int64_t r = row; r < row + rows; ++r) {
        const auto from = some_->some(r * strip_.step);
        const auto part = [&](int64_t column) { return r < strip_.count ? from.load_part(0, column) : Vec(0); };
        _mm512_storeu_si512(to + r * kDepth, both(part(first), part(first + kLanes)));
      }
    }
  }

  PackedWeightRows<Read> rows_;
  StripRows strip_;
  const Packed<Read>* some_ = nullptr;
  const uint8_t* next_ = nullptr;
  bool in_a_run_ = false;
  int64_t row_ = 0, groups_ = 0;  // from one of the strip's rows to the next, bytes and scales
  Rounded<Read> rounded_;
};
#endif

}  // namespace

template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16) {
  return std::make_unique<PackedRows<Read>>(weight, bfloat16);
}

template <class Read>
std::unique_ptr<PackedStrip> packed_strip([[maybe_unused]] const Weight& weight) {
#ifdef MOE_METAL_AMX
  return std::make_unique<PackedStripRows<Read>>(weight);
#else
  return nullptr;
#endif
}

#define MOE_METAL_ROWS_OF(Read)                                                \
  template std::unique_ptr<WeightRows> packed_rows<Read>(const Weight&, bool); \
  template std::unique_ptr<PackedStrip> packed_strip<Read>(const Weight&);

}  // namespace moe_metal
