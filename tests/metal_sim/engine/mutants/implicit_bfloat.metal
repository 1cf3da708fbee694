// Broken on purpose (compile): a float becomes a bfloat only by an explicit conversion
#include <metal_stdlib>
using namespace metal;

kernel void k(device bfloat* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1.0f; }
