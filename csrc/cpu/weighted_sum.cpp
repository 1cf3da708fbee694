#include "cpu/weighted_sum.h"
#include "cpu/ops.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const WeightedSum& call) {
  const auto K = call.K, H = call.H;
  const auto* slots = elements<Scalar>(call.slots);
  const auto* weights = elements<float>(call.weights);
  const auto* shared = call.shared.defined() ? elements<Scalar>(call.shared) : nullptr;
  const auto* shared_gate = call.shared_gate.defined() ? elements<float>(call.shared_gate) : nullptr;
  const auto* residual = call.residual.defined() ? elements<Scalar>(call.residual) : nullptr;
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_row(call.T, (K + 2) * H, H, [=](int64_t t, float* sum) {
    weighted_slots(slots + t * K * H, weights + t * K, K, H, sum);
    const Vec share(shared_gate ? 1 / (1 + std::exp(-shared_gate[t])) : 1.0f);
    for_each_vector(H, [=](int64_t h, auto count) {
      Vec total = load(sum + h, count);
      if (shared) total = at::vec::fmadd(share, load(shared + t * H + h, count), total);
      if (residual) total = total + load(residual + t * H + h, count);
      store(output + t * H + h, total, count);
    });
  });
}

}  // namespace

void run_weighted_sum(WeightedSum& call) {
  call.weights = as_float(call.weights);
  call.shared_gate = as_float(call.shared_gate);
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
