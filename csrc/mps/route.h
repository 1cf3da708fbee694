// The kernels of shaders/route.metal, for the ops route and gate.
#pragma once
#include <bit>
#include <iterator>

#include "contract/router.h"
#include "mps/launch.h"

namespace moe_metal {

constexpr int kRouteTokens = 4;  // of a threadgroup, one simdgroup each
constexpr int kRouteThreads = kRouteTokens * kSimdgroup;
// One for each number of logits per lane: 1, 2, 4, ... 32.
inline Kernels route_kernels[] = {
    {"route", "route_1", kRouteThreads, "route_1"},   {"route", "route_2", kRouteThreads, "route_2"},
    {"route", "route_4", kRouteThreads, "route_4"},   {"route", "route_8", kRouteThreads, "route_8"},
    {"route", "route_16", kRouteThreads, "route_16"}, {"route", "route_32", kRouteThreads, "route_32"}};

static_assert(kSimdgroup << (std::size(route_kernels) - 1) == kMaxExperts);

inline Kernel& route_kernel(int64_t experts, at::ScalarType dtype) {
  return route_kernels[std::bit_width(static_cast<uint64_t>(ceil_div(experts, kSimdgroup) - 1))][dtype];
}

// One simdgroup per token. With few tokens each has its own threadgroup, so that they spread over the GPU.
inline Grid route_grid(int64_t tokens) {
  const int64_t together = tokens <= 32 ? 1 : kRouteTokens;
  return {ceil_div(tokens, together), 1, static_cast<int>(together * kSimdgroup)};
}

inline RouteParams route_params(const RoutingParams& routing, int64_t tokens, const Tensor& logits,
                                const Tensor& select_bias, const Tensor& per_expert_scale) {
  return {
      .routing = routing,
      .tokens = to_uint(tokens),
      .logits = parameter_type(logits),
      .select_bias = parameter_type(select_bias),
      .per_expert_scale = parameter_type(per_expert_scale),
  };
}

}  // namespace moe_metal
