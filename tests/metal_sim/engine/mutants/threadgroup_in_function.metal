// Broken on purpose (compile): threadgroup variables must be declared in kernels
#include <metal_stdlib>
using namespace metal;

float f(float x) {
  threadgroup float y;
  y = x;
  return y;
}
kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = f(x[i]); }
