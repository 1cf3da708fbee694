// Router logits, shared by the kernels of gate.metal.
//
// logit = inv_rms(x) * sum_h x * norm_weight * router_weight + router_bias, since inv_rms is one number for all of x:
// the norm needs no pass of its own, and x is read once. Without norm_weight, inv_rms is 1.
#pragma once
#include "route.h"

namespace moe_metal {

template <typename T>
float4 norm_weight4(device const T* norm_weight, uint i, GateParams params) {
  if (params.norm_weight == ParameterType::absent) return 1;
  return load4(norm_weight, i, params.row, params.norm_weight);
}

inline float gate_inv_rms(float squares, GateParams params) {
  if (params.norm_weight == ParameterType::absent) return 1;
  return rsqrt(squares / float(params.row.length) + params.eps);
}

template <typename T>
float gate_bias(device const T* router_bias, uint expert, GateParams params) {
  return params.router_bias == ParameterType::absent ? 0 : load(router_bias, expert, params.router_bias);
}

// Sums over a part of H, for `Tokens` tokens and `Experts` experts at a time, so that every load is used several times.
template <uint Tokens, uint Experts>
struct Dots {
  float dots[Tokens][Experts];
  float squares[Tokens];
};

// Sums over the chunks first, first + step, ... of H. For rows past the end the last row is read; their results are
// not used.
template <bool aligned, uint Tokens, uint Experts, typename T, typename W>
Dots<Tokens, Experts> gate_dots(device const T* hidden, device const W* router_weight, device const T* norm_weight,
                                ulong token, uint expert, uint first, uint step, GateParams params) {
  const uint H = params.row.length;
  Dots<Tokens, Experts> sums;
  device const T* x[Tokens];
  device const W* w[Experts];
  for (uint t = 0; t < Tokens; ++t) {
    x[t] = hidden + min(token + t, ulong(params.route.tokens - 1)) * H;
    sums.squares[t] = 0;
    for (uint e = 0; e < Experts; ++e) sums.dots[t][e] = 0;
  }
  for (uint e = 0; e < Experts; ++e) {
    w[e] = router_weight + ulong(min(expert + e, uint(params.route.routing.experts - 1))) * H;
  }
  for (uint i = 4 * first; i < H; i += 4 * step) {
    const float4 weight = norm_weight4(norm_weight, i, params);
    float4 router[Experts];
    for (uint e = 0; e < Experts; ++e) router[e] = load4<aligned>(w[e], i, H);
    for (uint t = 0; t < Tokens; ++t) {
      float4 v = load4<aligned>(x[t], i, H);
      sums.squares[t] += dot(v, v);
      v *= weight;
      for (uint e = 0; e < Experts; ++e) sums.dots[t][e] += dot(v, router[e]);
    }
  }
  return sums;
}

}  // namespace moe_metal
