#include "cpu/ops.h"
#include "cpu/vector/rows.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const ResidualNorm& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const auto* residual = elements<Scalar>(call.residual);
  const auto* input = elements<Scalar>(call.input);
  const auto* weight = elements<float>(call.weight);
  const auto* scalar = call.scalar.defined() ? elements<float>(call.scalar) : nullptr;
  auto* output = call.output.mutable_data_ptr<Scalar>();
  auto* sum = call.sum.mutable_data_ptr<Scalar>();
  const bool past = past_caches(call.output, H);
  for_each_row(call.T, 4 * H, H, [=](int64_t t, float* exact) {
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec total = load(residual + t * H + h, count) + load(input + t * H + h, count);
      store(exact + h, total, count);
      store(sum + t * H + h, total, count, past);
    });
    const Vec scale(inv_rms(exact, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec normed = load(exact + h, count) * scale * load(weight + h, count);
      store(output + t * H + h, scalar ? normed * load(scalar + h, count) : normed, count, past);
    });
  });
}

}  // namespace

void run_residual_norm(ResidualNorm& call) {
  call.weight = as_float(call.weight);
  if (call.scalar.defined()) call.scalar = as_float(call.scalar).expand({call.H}).contiguous();
  with_dtype(call.input.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
