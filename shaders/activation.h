// The activation of an expert, act(gate) * up, for one element.
#pragma once
#include "common.h"
#include "maths.h"

namespace moe_metal {

// x * sigmoid(z). exp may overflow to infinity; the result is then 0 or -0. NaN stays NaN.
inline float times_sigmoid(float x, float z) { return x / (1 + exp(-z)); }

inline float activated(float gate, float up, ActivationParams params) {
  gate = gate > params.limit ? params.limit : gate;  // comparisons, unlike min and max, keep NaN
  up = up > params.limit ? params.limit : up < -params.limit ? -params.limit : up;
  switch (params.activation) {
    case Activation::silu:
      return times_sigmoid(gate, gate) * up;
    case Activation::gelu:
      return 0.5f * gate * complementary_erf(gate * -0.70710678f) * up;
    case Activation::gelu_tanh:  // 0.5 * (1 + tanh(z)) is sigmoid(2z)
      return times_sigmoid(gate, 1.5957691f * gate * (1 + 0.044715f * gate * gate)) * up;
    case Activation::relu2: {
      const float positive = gate < 0 ? 0 : gate;
      return positive * positive * up;
    }
    case Activation::swiglu_oai:
      return times_sigmoid(gate, params.alpha * gate) * (up + 1);
    case Activation::sigmoid:
      return times_sigmoid(up, gate);
  }
  return NAN;
}

}  // namespace moe_metal
