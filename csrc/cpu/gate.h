// Routing of logits, for all ways to compute `gate`.
#pragma once
#include "contract/router.h"
#include "cpu/route.h"
#include "cpu/vector/vec.h"

namespace moe_metal {

inline const float* floats(const Tensor& tensor) { return tensor.defined() ? elements<float>(tensor) : nullptr; }

// Routes token t by its logits. Each thread has its own.
class RouteToken {
 public:
  explicit RouteToken(const Gate& call)
      : call_(call), route_(call.params, floats(call.select_bias), floats(call.per_expert_scale)) {}

  void operator()(int64_t t, float* logits) {
    const int64_t E = call_.params.experts, K = call_.params.top_k;
    if (const float* bias = floats(call_.router_bias)) {
      for (int64_t e = 0; e < E; ++e) logits[e] += bias[e];
    }
    route_(logits, call_.weights.mutable_data_ptr<float>() + t * K, call_.ids.mutable_data_ptr<int32_t>() + t * K);
  }

 private:
  const Gate& call_;
  Router route_;
};

}  // namespace moe_metal
