// Broken on purpose (compile): a pointer without its address space, though only ever to thread memory
#include <metal_stdlib>
using namespace metal;

float first(const float* x) { return x[0]; }
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float mine[2] = {1.0f, 2.0f};
  out[i] = first(mine);
}
