// Broken on purpose (compile): Metal has no double
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { double d = x[i]; x[i] = float(d); }
