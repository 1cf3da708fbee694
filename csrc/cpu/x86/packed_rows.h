// Rows of packed weights on processors with AVX-512, in addition to weights/packed_rows.h.
#pragma once
#include "cpu/weights/packed_view.h"
#include "cpu/x86/packed_tile_rows.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/rows.h"

namespace moe_metal::x86 {
namespace {

// With tokens that are bfloat16 or may be rounded to it.
template <class Read>
class PackedRows final : public WeightRows {
 public:
  explicit PackedRows(const Weight& weight)
      : view_(weight), portable_(packed_rows<typename Read::Portable>(weight, true)) {}

  void product(const RowRange& rows, const RowRange& next, const Tokens& tokens, std::optional<Panel>& panel) override {
    switch (way_of(tokens, panel.has_value())) {
      case Way::panels:
        return by_panels(rows, next, tokens);
      case Way::dots:
        return by_dots(rows, next, tokens);
      case Way::portable:
        return portable_->product(rows, next, tokens, panel);
    }
  }
  void dequantize(int64_t expert, int64_t row, float* to) override { portable_->dequantize(expert, row, to); }

 private:
  // Integers for many tokens, if prepare_tokens() has prepared them; integers or bfloat16 for few.
  enum class Way { panels, dots, portable };
  Way way_of(const Tokens& tokens, bool are_many) const {
    if (tokens.prepared && tokens.count >= kWorthIntegerPanels) return Way::panels;
    if (!are_many && Read::Dots::takes(view_.shape(), tokens.count)) return Way::dots;
    return Way::portable;
  }

  void by_panels(const RowRange& rows, const RowRange& next, const Tokens& tokens) {
    panels_(view_.bind_rows(rows, 0, rows.count, view_.prefetched(rows, next)), tokens);
    replace_not_finite(rows, tokens);
  }
  void by_dots(const RowRange& rows, const RowRange& next, const Tokens& tokens) {
    constexpr bool kReadsScales = Read::Dots::kReadsScales;
    const uint8_t* after = view_.prefetched(rows, next);
    out_.resize(tokens.count);
    // Few rows stay in the L1 cache for more tokens, or have scales that fit there.
    const int64_t at_once = kReadsScales && tokens.count <= 4 ? rows.count : view_.rows_at_once();
    for (int64_t first = 0; first < rows.count; first += at_once) {
      const int64_t count = std::min(at_once, rows.count - first);
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      const Tokens here = {tokens.x, out_.data(), tokens.count};
      dots_(kReadsScales ? view_.without_scales(rows, first, count, after) : view_.bind_rows(rows, first, count, after),
            here);
      replace_not_finite({rows.expert, rows.first + first, count}, here);
    }
  }
  // The result of a token without digits is NaN, and the sum of a group may be infinite before it is scaled. Such
  // tokens are computed again, with each number scaled first.
  void replace_not_finite(const RowRange& rows, const Tokens& tokens) {
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!all_finite(tokens.out[n], rows.count)) portable_->scaled_first(rows, {tokens.x + n, tokens.out + n, 1});
    }
  }

  PackedView<Read> view_;
  typename Read::Dots dots_;
  typename Read::Panels panels_;
  const std::unique_ptr<PackedProducts> portable_;
  std::vector<float*> out_;
};

}  // namespace

template <class Read>
std::unique_ptr<WeightRows> rows(const Weight& weight) {
  return Read::Dots::available() ? std::make_unique<PackedRows<Read>>(weight) : nullptr;
}
template <class Read>
std::unique_ptr<PackedTileRow> tile_row(const Weight& weight) {
  return make_packed_tile_row<Read>(weight);
}
template <class Read>
std::unique_ptr<PreparedTokens> tokens(const Weight& weight, const Tensor& x) {
  return Read::Panels::prepare(weight, x);
}

#define MOE_METAL_X86_ROWS_OF(Read)                                      \
  template std::unique_ptr<WeightRows> rows<Read>(const Weight&);        \
  template std::unique_ptr<PackedTileRow> tile_row<Read>(const Weight&); \
  template std::unique_ptr<PreparedTokens> tokens<Read>(const Weight&, const Tensor&);

}  // namespace moe_metal::x86
