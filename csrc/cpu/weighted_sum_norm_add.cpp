#include "cpu/ops.h"
#include "cpu/weighted_sum.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const WeightedSum& call) {
  const auto K = call.K, H = call.H;
  const auto eps = call.eps;
  const auto* slots = elements<Scalar>(call.slots);
  const auto* weights = elements<float>(call.weights);
  const auto* residual = elements<Scalar>(call.residual);
  const auto* norm_weight = elements<float>(call.norm_weight);
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_row(call.T, (K + 2) * H, H, [=](int64_t t, float* sum) {
    weighted_slots(slots + t * K * H, weights + t * K, K, H, sum);
    const Vec scale(inv_rms(sum, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec moe = load(sum + h, count) * scale * load(norm_weight + h, count);
      store(output + t * H + h, load(residual + t * H + h, count) + moe, count);
    });
  });
}

}  // namespace

void run_weighted_sum_norm_add(WeightedSum& call) {
  call.weights = as_float(call.weights);
  call.norm_weight = as_float(call.norm_weight);
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
