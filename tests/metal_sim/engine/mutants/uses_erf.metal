// Broken on purpose (compile): Metal has no erf
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = erf(x[i]); }
