// Broken on purpose (compile): a reference without its address space
#include <metal_stdlib>
using namespace metal;

void halve(float& x) { x *= 0.5f; }
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float mine = out[i];
  halve(mine);
  out[i] = mine;
}
