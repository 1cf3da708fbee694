// Broken on purpose (compile): a name outside ASCII. In a comment it is allowed: µ
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float µ = 0.0f;
  x[i] = µ;
}
