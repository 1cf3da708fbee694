// Broken on purpose (compile): min(uint, int) is ambiguous in Metal
#include <metal_stdlib>
using namespace metal;

kernel void k(device uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = min(x[i], 3); }
