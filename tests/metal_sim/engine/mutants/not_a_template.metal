// Broken on purpose (compile): instantiates a kernel that is not a template
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 0.0f; }
template [[host_name("other")]] kernel decltype(k) k;
