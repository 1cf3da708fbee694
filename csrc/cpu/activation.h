// The activation of an expert, act(gate) * up, on vectors of float.
#pragma once
#include <limits>

#include "common.h"
#include "cpu/vector/sigmoid.h"

namespace moe_metal {

template <Activation activation>
inline Vec activated(Vec gate, Vec up, const ActivationParams& params) {
  if (params.limit < std::numeric_limits<float>::infinity()) {  // a branch costs less than clamping to infinity
    const Vec limit(params.limit);
    gate = at::vec::clamp_max(gate, limit);  // keeps NaN; minimum and maximum take more instructions for that
    up = at::vec::clamp_min(at::vec::clamp_max(up, limit), limit.neg());
  }
  if constexpr (activation == Activation::silu) {
    return times_sigmoid(gate, gate) * up;
  } else if constexpr (activation == Activation::gelu) {
    const Vec half_sqrt(0.70710678118654752f);
    return gate * Vec(0.5f) * (gate * half_sqrt).neg().erfc() * up;
  } else if constexpr (activation == Activation::gelu_tanh) {  // 0.5 * (1 + tanh(z)) is sigmoid(2z)
    const Vec twice_z = Vec(1.5957691216057308f) * gate * (Vec(1) + Vec(0.044715f) * gate * gate);
    return times_sigmoid(gate, twice_z) * up;
  } else if constexpr (activation == Activation::relu2) {
    const Vec positive = at::vec::clamp_min(gate, Vec(0));
    return positive * positive * up;
  } else if constexpr (activation == Activation::swiglu_oai) {
    return times_sigmoid(gate, Vec(params.alpha) * gate) * (up + Vec(1));
  } else {
    static_assert(activation == Activation::sigmoid);
    return times_sigmoid(up, gate);
  }
}

// body(activation) with the activation as a compile-time constant: activated<decltype(activation)::value>(...).
template <class Body>
inline void with_activation(Activation activation, Body&& body) {
#define MOE_METAL_CASE(name) \
  case Activation::name:     \
    return body(std::integral_constant<Activation, Activation::name>())
  switch (activation) {
    MOE_METAL_CASE(silu);
    MOE_METAL_CASE(gelu);
    MOE_METAL_CASE(gelu_tanh);
    MOE_METAL_CASE(relu2);
    MOE_METAL_CASE(swiglu_oai);
    MOE_METAL_CASE(sigmoid);
  }
#undef MOE_METAL_CASE
}

}  // namespace moe_metal
