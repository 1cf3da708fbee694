#include <vector>

#include "cpu/route.h"
#include "cpu/vector/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const Route& call) {
  const int64_t E = call.params.experts, K = call.params.top_k;
  const auto* logits = elements<Scalar>(call.logits);
  const auto* select_bias = call.select_bias.defined() ? elements<float>(call.select_bias) : nullptr;
  const auto* scale = call.per_expert_scale.defined() ? elements<float>(call.per_expert_scale) : nullptr;
  auto* weights = call.weights.mutable_data_ptr<float>();
  auto* ids = call.ids.mutable_data_ptr<int32_t>();
  constexpr int64_t kGrain = 16;  // a row takes about 0.5 us, the start of a thread several
  at::parallel_for(0, call.T, kGrain, [=, &call](int64_t begin, int64_t end) {
    Router router(call.params, select_bias, scale);
    std::vector<float> as_float(E);
    for (int64_t t = begin; t < end; ++t) {
      for_each_vector(E, [&](int64_t e, auto count) { store(&as_float[e], load(logits + t * E + e, count), count); });
      router(as_float.data(), weights + t * K, ids + t * K);
    }
  });
}

}  // namespace

void cpu::run_route(const Route& given) {
  Route call = given;
  call.select_bias = as_float(call.select_bias);
  call.per_expert_scale = as_float(call.per_expert_scale);
  with_dtype(call.logits.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
