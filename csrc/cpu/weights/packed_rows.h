// Rows of packed weights, and their products: one template for all formats, whose readers are in formats/*.h. The files
// *_rows.cpp compile the formats, in parallel. Members of a reader:
//   kColumns, kBytes      columns and bytes of a block of a row
//   kOwnScales            whether the blocks contain their scales, which scales() reads
//   kScalesAreRare        whether many columns of many rows share a scale
//   kGroup                columns that share a scale; 0: it depends on the weight, and kUsualGroup is the most frequent
//   kOffset               whether a value is scale * code + offset, or scale * code
//   operator()            the codes of a vector of a row's columns, as floats
//   load_permuted         with AVX2: the codes of kAtOnce vectors in a permuted order, which codes.permute_like_load()
//                         gives to the tokens' numbers, and in units of kUnit. kMiddle is the middle of these codes, 0
//                         if they are centred
//   transposed            some formats: transposed_columns() columns of kLanes rows, column by column; 0 if it cannot
//   floats                with NEON, instead of these two: the codes of 16 columns, in units of kUnit
//   Dots, Tiles, Panels   products with few tokens, with more, and with many, for instructions that the processor may
//                         have
#pragma once
#include "cpu/plan.h"
#include "cpu/weights/packed_weight_rows.h"
#include "cpu/weights/unpacked_rows.h"
#ifdef MOE_METAL_HAS_AVX512
#include "cpu/x86/packed_strips.h"
#endif

namespace moe_metal {
namespace {

// One or two tokens, against rows that are unpacked in registers.
template <int N, class Read>
void product_by_rows(const Packed<Read>& rows, const Tokens& tokens) {
  int64_t row = 0;
  if constexpr (N <= kTokensAtOnce / 2) {
    for (; row + 8 <= rows.rows; row += 8) dot<8, N>(rows, row, tokens, 0);
  }
  for (; row + 4 <= rows.rows; row += 4) dot<4, N>(rows, row, tokens, 0);
  for (; row < rows.rows; ++row) dot<1, N>(rows, row, tokens, 0);
}

template <class Read>
class PackedRows final : public WeightRows {
 public:
  PackedRows(const Weight& weight, bool bfloat16) : rows_(weight), bfloat16_(bfloat16) {}

  void product(const RowRange& rows, const RowRange& next, const Tokens& tokens, std::optional<Panel>& panel) override {
    const uint8_t* after = rows_.prefetched(rows, next);
    if constexpr (kHasPanels) {
      if (tokens.prepared && tokens.count >= kWorthIntegerPanels) {
        return by_integer_panels(rows_.bind_rows(rows, 0, rows.count, after), tokens);
      }
    }
    if (panel) return by_panels(rows_.bind_rows(rows, 0, rows.count, after), tokens, panel);
    out_.resize(tokens.count);
    const bool tiles = bfloat16_ && Read::Tiles::takes(rows_.shape(), tokens.count);
    // Few rows stay in the L1 cache for more tokens, or have scales that fit there.
    const bool all = tokens.count <= 4 && reads_scales(tokens);
    const int64_t at_once = all ? rows.count : tiles ? rows_.kMaxRowsAtOnce : rows_.rows_at_once();
    for (int64_t first = 0; first < rows.count; first += at_once) {
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      multiply_block(rows, first, std::min(at_once, rows.count - first), after, {tokens.x, out_.data(), tokens.count});
    }
  }
  void dequantize(int64_t expert, int64_t row, float* to) override {
    unpacked_.unpack(rows_.bind_rows({expert, row, 1}, 0, 1, nullptr), 0, to);
  }

 private:
  static constexpr bool kHasPanels = !std::is_same_v<typename Read::Panels, NoDots>;

  // Whether the product of these tokens reads scales itself.
  bool reads_scales(const Tokens& tokens) const {
    constexpr bool kReadsScales = Read::Dots::kReadsScales;
    static_assert(!kReadsScales || std::is_same_v<typename Read::Tiles, NoDots>);
    return kReadsScales && bfloat16_ && Read::Dots::takes(rows_.shape(), tokens.count);
  }
  void multiply_block(const RowRange& range, int64_t skip, int64_t count, const uint8_t* after, const Tokens& tokens) {
    const bool later = reads_scales(tokens);
    const auto& rows =
        later ? rows_.without_scales(range, skip, count, after) : rows_.bind_rows(range, skip, count, after);
    if (!scaled_last(rows, tokens)) return scaled_first(rows, tokens);
    // The result of a token without digits is NaN, and the sum of a group may be infinite before it is scaled. Such
    // tokens are computed again, with each number scaled first.
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (all_finite(tokens.out[n], rows.rows)) continue;
      if (later) rows_.with_scales(range, skip);
      scaled_first(rows, {tokens.x + n, tokens.out + n, 1});
    }
  }
  void scaled_first(const Packed<Read>& rows, const Tokens& tokens) {
    if constexpr (kUnpacksInRegisters && !GroupDots<Read>::kTakesAll) {
      if (tokens.count == 1) return product_by_rows<1>(rows, tokens);
      if (tokens.count == 2) return product_by_rows<2>(rows, tokens);
    }
    std::optional<Panel> none;
    unpacked_.product(rows, tokens, none);
  }
  void by_panels(const Packed<Read>& rows, const Tokens& tokens, std::optional<Panel>& panel) {
    if constexpr (kUnpacksInRegisters)
      panel->product(rows, tokens);
    else
      unpacked_.product(rows, tokens, panel);
  }
  void by_integer_panels(const Packed<Read>& rows, const Tokens& tokens) {
    panels_(rows, tokens);
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!all_finite(tokens.out[n], rows.rows)) scaled_first(rows, {tokens.x + n, tokens.out + n, 1});
    }
  }
  // Products that are summed before they are scaled. -> whether there is one for these rows and tokens
  bool scaled_last(const Packed<Read>& rows, const Tokens& tokens) {
    if (bfloat16_ && rows.rows % Read::Tiles::kRowsAtOnce == 0 && Read::Tiles::takes(rows, tokens.count)) {
      tiles_(rows, tokens);
      return true;
    }
    if (bfloat16_ && Read::Dots::takes(rows, tokens.count)) {
      dots_(rows, tokens);
      return true;
    }
    if constexpr (GroupDots<Read>::kExists) {
      const int64_t group = rows_.weight().group;
      if (group >= 2 * kLanes && rows.columns % group == 0 && tokens.count <= GroupDots<Read>::kMost) {
        by_groups_(rows, tokens);
        return true;
      }
    }
    return false;
  }

  PackedWeightRows<Read> rows_;
  const bool bfloat16_;  // see rows_of()
  typename Read::Tiles tiles_;
  typename Read::Dots dots_;
  typename Read::Panels panels_;
  GroupDots<Read> by_groups_;
  UnpackedRows<Read> unpacked_;
  std::vector<float*> out_;
};

}  // namespace

template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16) {
  return std::make_unique<PackedRows<Read>>(weight, bfloat16);
}

template <class Read>
std::unique_ptr<PackedStrip> packed_strip([[maybe_unused]] const Weight& weight) {
#ifdef MOE_METAL_HAS_AVX512
  return make_packed_strip<Read>(weight);
#else
  return nullptr;
#endif
}

template <class Read>
std::unique_ptr<PreparedTokens> tokens_for_rows([[maybe_unused]] const Weight& weight,
                                                [[maybe_unused]] const Tensor& x) {
  if constexpr (requires { Read::Panels::prepare(weight, x); }) {
    return Read::Panels::prepare(weight, x);
  }
  return nullptr;
}

#define MOE_METAL_ROWS_OF(Read)                                                \
  template std::unique_ptr<WeightRows> packed_rows<Read>(const Weight&, bool); \
  template std::unique_ptr<PackedStrip> packed_strip<Read>(const Weight&);     \
  template std::unique_ptr<PreparedTokens> tokens_for_rows<Read>(const Weight&, const Tensor&);

}  // namespace moe_metal
