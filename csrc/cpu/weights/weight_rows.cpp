// Rows of dense weights, and the selection of the rows for a format.
#include "cpu/weights/weight_rows.h"

#include "cpu/formats/affine.h"
#include "cpu/formats/e2m1.h"
#include "cpu/formats/e4m3.h"
#include "cpu/formats/ggml_32.h"
#include "cpu/formats/ggml_k.h"
#include "cpu/processor_ways.h"

namespace moe_metal {

MOE_METAL_PRODUCTS(, float)
MOE_METAL_PRODUCTS(, at::Half)
MOE_METAL_PRODUCTS(, at::BFloat16)

namespace {

template <class Scalar>
class DenseRows final : public WeightRows {
 public:
  explicit DenseRows(const Weight& weight) : weight_(weight), data_(elements<Scalar>(weight.data)) {}

  void product(const RowRange& rows, const RowRange&, const Tokens& tokens, std::optional<Panel>& panel) override {
    const Scalar* data = row(rows.expert, rows.first);
    moe_metal::product(Matrix<Scalar>{data, weight_.row, weight_.column, rows.count, weight_.columns}, tokens, panel);
  }
  void dequantize(int64_t expert, int64_t number, float* to) override {
    const Scalar* from = row(expert, number);
    for (int64_t c = 0; c < weight_.columns; ++c) to[c] = static_cast<float>(from[c * weight_.column]);
  }

 private:
  const Scalar* row(int64_t expert, int64_t number) const { return data_ + weight_.row_start(expert, number); }

  const Weight& weight_;
  const Scalar* data_;
};

std::unique_ptr<WeightRows> dense_rows(const Weight& weight, bool) {
  std::unique_ptr<WeightRows> rows;
  with_dtype(weight.data.scalar_type(),
             [&](auto scalar) { rows = std::make_unique<DenseRows<decltype(scalar)>>(weight); });
  return rows;
}

template <class Read>
std::unique_ptr<WeightRows> packed(const Weight& weight, bool bfloat16) {
  return packed_rows<Read>(weight, bfloat16);
}

struct Maker {
  std::string_view format;
  std::unique_ptr<WeightRows> (*rows)(const Weight&, bool);
};
constexpr Maker kMakers[] = {
    {"dense", dense_rows},
    {"affine2", packed<Affine<2>>},
    {"affine3", packed<Affine<3>>},
    {"affine4", packed<Affine<4>>},
    {"affine5", packed<Affine<5>>},
    {"affine6", packed<Affine<6>>},
    {"affine8", packed<Affine<8>>},
    {"mxfp4", packed<E2m1>},
    {"fp8", packed<E4m3Blocks>},
    {"mxfp8", packed<E4m3Groups>},
    {"nvfp4", packed<E2m1>},
    {"q4_0", packed<Blocks<Q4_0>>},
    {"q4_1", packed<Blocks<Q4_1>>},
    {"q5_0", packed<Blocks<Q5_0>>},
    {"q5_1", packed<Blocks<Q5_1>>},
    {"q8_0", packed<Blocks<Q8_0>>},
    {"q2_k", packed<Blocks<Q2_K>>},
    {"q3_k", packed<Blocks<Q3_K>>},
    {"q4_k", packed<Blocks<Q4_K>>},
    {"q5_k", packed<Blocks<Q5_K>>},
    {"q6_k", packed<Blocks<Q6_K>>},
    {"iq4_nl", packed<Blocks<Iq4Nl>>},
    {"iq4_xs", packed<Blocks<Iq4Xs>>},
    {"ggml_mxfp4", packed<Blocks<GgmlMxfp4>>},
};
static_assert(in_order_of_formats(kMakers));

}  // namespace

std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16) {
  if (const auto make = processor_ways().rows) {
    if (auto rows = make(weight, bfloat16)) return rows;
  }
  return kMakers[weight.format - kFormats].rows(weight, bfloat16);
}

std::unique_ptr<PreparedTokens> prepare_tokens(const Weight& weight, const Tensor& x) {
  const auto prepare = processor_ways().tokens;
  return prepare ? prepare(weight, x) : nullptr;
}

}  // namespace moe_metal
