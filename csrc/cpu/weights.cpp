// Rows of dense weights, and the choice of a format's rows.
#include "weights.h"

#include "cpu/formats/affine.h"
#include "cpu/formats/fp8.h"
#include "cpu/formats/mxfp4.h"

namespace moe_metal {
namespace {

template <class Scalar>
class DenseRows final : public WeightRows {
 public:
  explicit DenseRows(const Weight& weight) : weight_(weight), data_(elements<Scalar>(weight.data)) {}

  void take(int64_t expert, int64_t first, int64_t count) override {
    matrix_ = {data_ + expert * weight_.expert + first * weight_.row, weight_.row, weight_.column, count,
               weight_.columns};
  }
  void product(const Tokens& tokens, std::optional<Panel>& panel) override {
    moe_metal::product(matrix_, tokens, panel);
  }
  void dequantize(int64_t row, float* to) override {
    const Scalar* from = matrix_.data + row * matrix_.row;
    for (int64_t c = 0; c < matrix_.columns; ++c) to[c] = static_cast<float>(from[c * matrix_.column]);
  }

 private:
  const Weight& weight_;
  const Scalar* data_;
  Matrix<Scalar> matrix_;
};

std::unique_ptr<WeightRows> dense_rows(const Weight& weight, bool) {
  std::unique_ptr<WeightRows> rows;
  with_dtype(weight.data.scalar_type(),
             [&](auto scalar) { rows = std::make_unique<DenseRows<decltype(scalar)>>(weight); });
  return rows;
}

// In the order of kFormats.
constexpr std::unique_ptr<WeightRows> (*kRowsOf[])(const Weight&, bool) = {
    dense_rows,
    packed_rows<Affine<2>>,
    packed_rows<Affine<3>>,
    packed_rows<Affine<4>>,
    packed_rows<Affine<5>>,
    packed_rows<Affine<6>>,
    packed_rows<Affine<8>>,
    packed_rows<Mxfp4>,
    packed_rows<Fp8>,
};
static_assert(std::size(kRowsOf) == kFormatCount, "one for each row of the table");

}  // namespace

std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16) {
  return kRowsOf[weight.format - kFormats](weight, bfloat16);
}

}  // namespace moe_metal
