// The K best experts of each token and their weights, best first; see reference.route.
//
// logits [T, E]; select_bias, per_expert_scale [E], or absent; weights float [T, K]; ids int [T, K].
// Grid: one simdgroup per token; a threadgroup holds as many tokens as it has simdgroups, along x.
// N is the number of logits per lane: route_N_T is for up to 32 * N experts.
#include <metal_stdlib>
using namespace metal;

#include "route.h"

namespace moe_metal {

template <typename T, uint N>
[[kernel]] void route(device const T* logits [[buffer(0)]], device const T* select_bias [[buffer(1)]],
                      device const T* per_expert_scale [[buffer(2)]], device float* weights [[buffer(3)]],
                      device int* ids [[buffer(4)]], constant RouteParams& params [[buffer(5)]],
                      uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong token = ulong(group) * simdgroups + simdgroup;
  if (token >= params.tokens) return;
  const uint E = params.routing.experts, K = params.routing.top_k;
  float own[N];
  for (uint n = 0; n < N; ++n) {
    const uint expert = lane + n * kSimdgroup;
    own[n] = expert < E ? load(logits, token * E + expert, params.logits) : 0;
  }
  route_token<N>(own, select_bias, per_expert_scale, weights + token * K, ids + token * K, lane, params);
}

}  // namespace moe_metal

// clang-format off
#define instantiate_route(dtype, N) instantiate_kernel("route_" #N "_" #dtype, moe_metal::route<dtype, N>)

#if in_part(route_1)
for_dtypes(instantiate_route, 1)
#endif
#if in_part(route_2)
for_dtypes(instantiate_route, 2)
#endif
#if in_part(route_4)
for_dtypes(instantiate_route, 4)
#endif
#if in_part(route_8)
for_dtypes(instantiate_route, 8)
#endif
#if in_part(route_16)
for_dtypes(instantiate_route, 16)
#endif
#if in_part(route_32)
for_dtypes(instantiate_route, 32)
#endif
