// What x86 adds to the rows of packed weights, for one format's reader. MOE_METAL_X86_ROWS_OF compiles them in one of
// x86/formats/*.cpp.
#pragma once
#include "cpu/weights/weight_rows.h"
#include "cpu/x86/packed_tile_row.h"

namespace moe_metal::x86 {

// Rows for tokens that are bfloat16 or may be rounded to it. Returns null if the processor adds nothing.
template <class Read>
std::unique_ptr<WeightRows> rows(const Weight& weight);
template <class Read>
std::unique_ptr<PackedTileRow> tile_row(const Weight& weight);
// Tokens for IntegerPanels. Returns null if there are faster products.
template <class Read>
std::unique_ptr<PreparedTokens> tokens(const Weight& weight, const Tensor& x);

}  // namespace moe_metal::x86
