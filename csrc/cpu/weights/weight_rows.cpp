// Rows of dense weights, and the selection of the rows for a format.
#include "cpu/weights/weight_rows.h"

#include "cpu/formats/affine.h"
#include "cpu/formats/e2m1.h"
#include "cpu/formats/e4m3.h"
#include "cpu/formats/ggml_32.h"
#include "cpu/formats/ggml_k.h"

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
  const Scalar* row(int64_t expert, int64_t number) const { return data_ + weight_.place(expert, number); }

  const Weight& weight_;
  const Scalar* data_;
};

std::unique_ptr<WeightRows> dense_rows(const Weight& weight, bool) {
  std::unique_ptr<WeightRows> rows;
  with_dtype(weight.data.scalar_type(),
             [&](auto scalar) { rows = std::make_unique<DenseRows<decltype(scalar)>>(weight); });
  return rows;
}
std::unique_ptr<PackedStrip> no_strip(const Weight&) { return nullptr; }
std::unique_ptr<PreparedTokens> no_tokens(const Weight&, const Tensor&) { return nullptr; }

struct Maker {
  std::unique_ptr<WeightRows> (*rows)(const Weight&, bool);
  std::unique_ptr<PackedStrip> (*strip)(const Weight&);
  std::unique_ptr<PreparedTokens> (*tokens)(const Weight&, const Tensor&);
};
template <class Read>
constexpr Maker kPacked = {packed_rows<Read>, packed_strip<Read>, tokens_for_rows<Read>};

// In the order of kFormats.
constexpr Maker kMakers[] = {
    {dense_rows, no_strip, no_tokens},
    kPacked<Affine<2>>,
    kPacked<Affine<3>>,
    kPacked<Affine<4>>,
    kPacked<Affine<5>>,
    kPacked<Affine<6>>,
    kPacked<Affine<8>>,
    kPacked<E2m1>,        // mxfp4
    kPacked<E4m3Blocks>,  // fp8
    kPacked<E4m3Groups>,  // mxfp8
    kPacked<E2m1>,        // nvfp4
    kPacked<Blocks<Q4_0>>,
    kPacked<Blocks<Q4_1>>,
    kPacked<Blocks<Q5_0>>,
    kPacked<Blocks<Q5_1>>,
    kPacked<Blocks<Q8_0>>,
    kPacked<Blocks<Q2_K>>,
    kPacked<Blocks<Q3_K>>,
    kPacked<Blocks<Q4_K>>,
    kPacked<Blocks<Q5_K>>,
    kPacked<Blocks<Q6_K>>,
    kPacked<Blocks<Iq4Nl>>,
    kPacked<Blocks<Iq4Xs>>,
    kPacked<Blocks<GgmlMxfp4>>,
};
static_assert(std::size(kMakers) == kFormatCount, "one for each row of the table");
const Maker& maker_of(const Weight& weight) { return kMakers[weight.format - kFormats]; }

}  // namespace

std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16) {
  return maker_of(weight).rows(weight, bfloat16);
}
std::unique_ptr<PackedStrip> strip_of(const Weight& weight) { return maker_of(weight).strip(weight); }
std::unique_ptr<PreparedTokens> prepare_tokens(const Weight& weight, const Tensor& x) {
  return maker_of(weight).tokens(weight, x);
}

}  // namespace moe_metal
