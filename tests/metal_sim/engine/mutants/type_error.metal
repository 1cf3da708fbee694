// Broken on purpose (compile): an undeclared name
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = missing_name; }
