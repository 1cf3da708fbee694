// Broken on purpose (stack): calls itself forever
#include <metal_stdlib>
using namespace metal;

float down(float x) { return x > 0.0f ? down(x + 1.0f) * 0.5f + 1.0f : x; }
kernel void recursive(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = down(float(i) + 1.0f);
}
