// Broken on purpose (compile): writes to constant memory
#include <metal_stdlib>
using namespace metal;

kernel void k(constant float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 0.0f; }
