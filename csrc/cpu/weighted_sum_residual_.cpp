#include "cpu/ops.h"
#include "cpu/weighted_sum.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const WeightedSum& call) {
  const auto K = call.K, H = call.H;
  const auto* slots = elements<Scalar>(call.slots);
  const auto* weights = elements<float>(call.weights);
  auto* residual = call.residual.mutable_data_ptr<Scalar>();
  for_each_row(call.T, (K + 2) * H, H, [=](int64_t t, float* sum) {
    weighted_slots(slots + t * K * H, weights + t * K, K, H, sum);
    auto* row = residual + t * H;
    for_each_vector(H,
                    [=](int64_t h, auto count) { store(row + h, load(sum + h, count) + load(row + h, count), count); });
  });
}

}  // namespace

void run_weighted_sum_residual_(WeightedSum& call) {
  call.weights = as_float(call.weights);
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
