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
  const auto* norm_weight = elements<float>(call.norm_weight);
  auto* residual = call.residual.mutable_data_ptr<Scalar>();
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_row(call.T, (K + 3) * H, H, [=](int64_t t, float* sum) {
    weighted_slots(slots + t * K * H, weights + t * K, K, H, sum);
    auto* row = residual + t * H;
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec total = load(sum + h, count) + load(row + h, count);
      store(row + h, total, count);
      store(sum + h, total, count);
    });
    const Vec scale(inv_rms(sum, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      store(output + t * H + h, load(sum + h, count) * scale * load(norm_weight + h, count), count);
    });
  });
}

}  // namespace

void run_weighted_sum_residual_norm_(WeightedSum& call) {
  call.weights = as_float(call.weights);
  call.norm_weight = as_float(call.norm_weight);
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
