// Broken on purpose (address space): Metal has no recursion, however short
#include <metal_stdlib>
using namespace metal;

float factorial(uint n) { return n < 2 ? 1.0f : float(n) * factorial(n - 1); }
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = factorial(i); }
