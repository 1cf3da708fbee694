// Broken on purpose (compile): a parameter without an attribute
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i) { x[i] = 0.0f; }
