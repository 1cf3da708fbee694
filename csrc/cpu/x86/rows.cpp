// Selects what x86 adds for a format, and offers it to the portable code.
#include "cpu/x86/rows.h"
#include "cpu/processor_ways.h"
#include "cpu/x86/formats/codes.h"
#include "cpu/x86/formats/ggml_32.h"
#include "cpu/x86/formats/ggml_k.h"

namespace moe_metal {
namespace x86 {
namespace {

struct Ways {
  std::string_view format;
  std::unique_ptr<WeightRows> (*rows)(const Weight&) = nullptr;
  std::unique_ptr<PackedTileRow> (*tile_row)(const Weight&) = nullptr;
  std::unique_ptr<PreparedTokens> (*tokens)(const Weight&, const Tensor&) = nullptr;
};
template <class Read>
constexpr Ways ways_of(std::string_view format) {
  return {format, rows<Read>, tile_row<Read>, tokens<Read>};
}
constexpr Ways kWays[] = {
    {"dense"},
    ways_of<Affine<2>>("affine2"),
    ways_of<Affine<3>>("affine3"),
    ways_of<Affine<4>>("affine4"),
    ways_of<Affine<5>>("affine5"),
    ways_of<Affine<6>>("affine6"),
    ways_of<Affine<8>>("affine8"),
    ways_of<E2m1>("mxfp4"),
    ways_of<E4m3Blocks>("fp8"),
    ways_of<E4m3Groups>("mxfp8"),
    ways_of<E2m1>("nvfp4"),
    ways_of<Blocks<Q4_0>>("q4_0"),
    ways_of<Blocks<Q4_1>>("q4_1"),
    ways_of<Blocks<Q5_0>>("q5_0"),
    ways_of<Blocks<Q5_1>>("q5_1"),
    ways_of<Blocks<Q8_0>>("q8_0"),
    ways_of<Blocks<Q2_K>>("q2_k"),
    ways_of<Blocks<Q3_K>>("q3_k"),
    ways_of<Blocks<Q4_K>>("q4_k"),
    ways_of<Blocks<Q5_K>>("q5_k"),
    ways_of<Blocks<Q6_K>>("q6_k"),
    ways_of<Blocks<Iq4Nl>>("iq4_nl"),
    ways_of<Blocks<Iq4Xs>>("iq4_xs"),
    ways_of<Blocks<GgmlMxfp4>>("ggml_mxfp4"),
};
static_assert(in_order_of_formats(kWays));
const Ways& ways_of(const Weight& weight) { return kWays[weight.format - kFormats]; }

std::unique_ptr<WeightRows> rows_of_any(const Weight& weight, bool bfloat16) {
  const auto make = ways_of(weight).rows;
  return bfloat16 && make ? make(weight) : nullptr;
}
std::unique_ptr<PreparedTokens> tokens_for_any(const Weight& weight, const Tensor& x) {
  const auto prepare = ways_of(weight).tokens;
  return prepare ? prepare(weight, x) : nullptr;
}

[[maybe_unused]] const bool kOffered = [] {
  processor_ways().rows = rows_of_any;
  processor_ways().tokens = tokens_for_any;
  return true;
}();

}  // namespace
}  // namespace x86

std::unique_ptr<PackedTileRow> tile_row_of(const Weight& weight) { return x86::ways_of(weight).tile_row(weight); }

}  // namespace moe_metal
