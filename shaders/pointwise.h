// The activations of convolutions and gates.
#pragma once
#include "activation.h"

namespace moe_metal {

inline float pointwise(float x, Pointwise function) {
  return function == Pointwise::none ? x : function == Pointwise::silu ? times_sigmoid(x, x) : sigmoid(x);
}

}  // namespace moe_metal
