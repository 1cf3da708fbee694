// Rows of dense weights, and the choice of a format's rows.
#include "weights.h"

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

}  // namespace

std::unique_ptr<WeightRows> rows_of(const Weight& weight, bool bfloat16) {
  if (weight.format == Format::affine) {
    return 8 % weight.bits == 0 ? affine_rows(weight, bfloat16) : affine_rows_across_bytes(weight, bfloat16);
  }
  if (weight.format != Format::dense) return float_rows(weight, bfloat16);
  std::unique_ptr<WeightRows> rows;
  with_dtype(weight.data.scalar_type(),
             [&](auto scalar) { rows = std::make_unique<DenseRows<decltype(scalar)>>(weight); });
  return rows;
}

}  // namespace moe_metal
