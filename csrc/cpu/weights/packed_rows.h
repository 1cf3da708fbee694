// Rows of packed weights, and their products: one template for all formats, whose readers are in formats/*.h. The files
// *_rows.cpp compile the formats, in parallel. Members of a reader:
//   kColumns, kBytes      columns and bytes of a block of a row
//   kOwnScales            whether the blocks contain their scales, which scales() reads
//   kGroup                columns that share a scale; 0: it depends on the weight, and kUsualGroup is the most frequent
//   kOffset               whether a value is scale * code + offset, or scale * code
//   floats()              the codes of 16 columns of a row, in units of kUnit
//   Dots                  products with few bfloat16 tokens, for instructions that the processor may have
// and for processors on which products unpack rows in registers:
//   vector()              the codes of a vector of columns
//   load_permuted()       the codes of kAtOnce vectors in a permuted order, which permute_like_load() gives to the
//                         tokens' numbers, in units of kUnit. kMiddle is the middle of these codes, 0 if they are
//                         centred
//   transposed()          some formats: kTransposedColumns columns of kLanes rows, column by column
#pragma once
#include "cpu/weights/group_dots.h"
#include "cpu/weights/packed_view.h"
#include "cpu/weights/unpacked_product.h"

namespace moe_metal {
namespace {

template <class Read>
class PackedRows final : public PackedProducts {
 public:
  PackedRows(const Weight& weight, bool bfloat16) : view_(weight), bfloat16_(bfloat16) {}

  void product(const RowRange& rows, const RowRange& next, const Tokens& tokens, std::optional<Panel>& panel) override {
    const uint8_t* after = view_.prefetched(rows, next);
    if (panel) return by_panels(view_.bind_rows(rows, 0, rows.count, after), tokens, panel);
    const Way way = way_of(tokens.count);
    out_.resize(tokens.count);
    // Few rows have scales that fit in the L1 cache, and stay there themselves for more tokens.
    const int64_t at_once = view_.rows_at_once();
    for (int64_t first = 0; first < rows.count; first += at_once) {
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      const auto& matrix = view_.bind_rows(rows, first, std::min(at_once, rows.count - first), after);
      multiply(way, matrix, {tokens.x, out_.data(), tokens.count});
    }
  }
  void scaled_first(const RowRange& rows, const Tokens& tokens) override {
    scaled_first(view_.bind_rows(rows, 0, rows.count, view_.prefetched(rows, {})), tokens);
  }
  void dequantize(int64_t expert, int64_t row, float* to) override {
    unpacked_.unpack(view_.bind_rows({expert, row, 1}, 0, 1, nullptr), 0, to);
  }

 private:
  // How rows are multiplied by tokens if there is no panel. The first two sum the products of a group before they are
  // scaled.
  enum class Way { dots, group_dots, scaled_first };
  Way way_of(int64_t tokens) const {
    if (bfloat16_ && Read::Dots::takes(view_.shape(), tokens)) return Way::dots;
    if (GroupDots<Read>::takes(view_.shape(), tokens)) return Way::group_dots;
    return Way::scaled_first;
  }
  void multiply(Way way, const PackedMatrix<Read>& rows, const Tokens& tokens) {
    if (way == Way::dots) dots_(rows, tokens);
    if constexpr (GroupDots<Read>::kExists) {
      if (way == Way::group_dots) by_groups_(rows, tokens);
    }
    if (way == Way::scaled_first) return scaled_first(rows, tokens);
    // The result of a token without digits is NaN, and the sum of a group may be infinite before it is scaled. Such
    // tokens are computed again, with each number scaled first.
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!all_finite(tokens.out[n], rows.rows)) scaled_first(rows, {tokens.x + n, tokens.out + n, 1});
    }
  }
  // Rows are unpacked in registers for one or two tokens, and otherwise in cache.
  void scaled_first(const PackedMatrix<Read>& rows, const Tokens& tokens) {
    if constexpr (kUnpacksInRegisters && !GroupDots<Read>::kTakesAll) {
      if (tokens.count == 1) return unpacked_in_registers<1>(rows, tokens);
      if (tokens.count == 2) return unpacked_in_registers<2>(rows, tokens);
    }
    std::optional<Panel> none;
    unpacked_.product(rows, tokens, none);
  }
  template <int N>
  static void unpacked_in_registers(const PackedMatrix<Read>& rows, const Tokens& tokens) {
    int64_t row = 0;
    if constexpr (N <= kTokensAtOnce / 2) {
      for (; row + 8 <= rows.rows; row += 8) dot<8, N>(rows, row, tokens, 0);
    }
    for (; row + 4 <= rows.rows; row += 4) dot<4, N>(rows, row, tokens, 0);
    for (; row < rows.rows; ++row) dot<1, N>(rows, row, tokens, 0);
  }
  // Rows are transposed for many tokens, in a panel.
  void by_panels(const PackedMatrix<Read>& rows, const Tokens& tokens, std::optional<Panel>& panel) {
    if constexpr (kUnpacksInRegisters)
      panel->product(rows, tokens);
    else
      unpacked_.product(rows, tokens, panel);
  }

  PackedView<Read> view_;
  const bool bfloat16_;  // see rows_of()
  typename Read::Dots dots_;
  GroupDots<Read> by_groups_;
  UnpackedProduct<Read> unpacked_;
  std::vector<float*> out_;
};

}  // namespace

template <class Read>
std::unique_ptr<PackedProducts> packed_rows(const Weight& weight, bool bfloat16) {
  return std::make_unique<PackedRows<Read>>(weight, bfloat16);
}

#define MOE_METAL_ROWS_OF(Read) template std::unique_ptr<PackedProducts> packed_rows<Read>(const Weight&, bool);

}  // namespace moe_metal
