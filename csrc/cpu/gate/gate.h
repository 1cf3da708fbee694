// Shared by the ways to compute `gate`: the rows of hidden as operands of products, and the routing of logits.
#pragma once
#include "contract.h"
#include "cpu/route.h"
#include "cpu/vector/rows.h"

namespace moe_metal {

inline const float* floats(const Tensor& tensor) { return tensor.defined() ? elements<float>(tensor) : nullptr; }

// The factor by which the norm multiplies a row of hidden, without the weights.
template <class Scalar>
inline float norm_scale(const Gate& call, const Scalar* row) {
  return call.norm_weight.defined() ? inv_rms(row, call.H, call.eps) : 1;
}

// to[h] = row[h] as float, normed if there are norm weights.
template <class Scalar>
inline void float_row(const Scalar* row, const Vec& scale, const float* norm_weight, int64_t count, float* to) {
  for_each_vector(count, [=](int64_t h, auto n) {
    const Vec x = load(row + h, n);
    store(to + h, norm_weight ? x * scale * load(norm_weight + h, n) : x, n);
  });
}

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

// The same for tokens [first, first + count), on all threads. `width`: from one token's logits to the next.
inline void route_tokens(const Gate& call, int64_t first, int64_t count, float* logits, int64_t width) {
  constexpr int64_t kWorthAThread = 16;
  at::parallel_for(0, count, kWorthAThread, [&](int64_t begin, int64_t end) {
    RouteToken route(call);
    for (int64_t t = begin; t < end; ++t) route(first + t, logits + t * width);
  });
}

}  // namespace moe_metal
