// Broken on purpose (address space): a device pointer becomes a threadgroup pointer
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float* x = (threadgroup float*)out;
  out[i] = x[i];
}
