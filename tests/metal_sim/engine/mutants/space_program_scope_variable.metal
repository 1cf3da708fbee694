// Broken on purpose (address space): a program-scope variable outside constant
#include <metal_stdlib>
using namespace metal;

constexpr float factor = 2.0f;
float table[2] = {1.0f, 2.0f};
kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = factor * table[i % 2]; }
