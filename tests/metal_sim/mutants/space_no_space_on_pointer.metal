// Broken on purpose (address space): a pointer parameter without its address space
#include <metal_stdlib>
using namespace metal;

float first(const float* x) { return x[0]; }
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = first(out); }
