// norm_add and norm. norm has no residual, and its weight is optional.
#include "cpu/ops.h"
#include "cpu/vector/rows.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const ResidualNorm& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const auto* residual = call.residual.defined() ? elements<Scalar>(call.residual) : nullptr;
  const auto* input = elements<Scalar>(call.input);
  const auto* weight = call.weight.defined() ? elements<float>(call.weight) : nullptr;
  const auto* scalar = call.scalar.defined() ? elements<float>(call.scalar) : nullptr;
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_row(call.T, 3 * H, 0, [=](int64_t t, float*) {
    const Vec scale(inv_rms(input + t * H, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec normed = load(input + t * H + h, count) * scale;
      const Vec weighted = weight ? normed * load(weight + h, count) : normed;
      const Vec total = residual ? load(residual + t * H + h, count) + weighted : weighted;
      store(output + t * H + h, scalar ? total * load(scalar + h, count) : total, count);
    });
  });
}

}  // namespace

void run_norm_add(ResidualNorm& call) {
  call.weight = as_float(call.weight);
  if (call.scalar.defined()) call.scalar = as_float(call.scalar).expand({call.H}).contiguous();
  with_dtype(call.input.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
