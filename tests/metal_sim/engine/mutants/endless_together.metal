// Broken on purpose (time): all lanes agree to go on for ever
#include <metal_stdlib>
using namespace metal;

kernel void endless(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float sum = 1.0f;
  while (simd_any(sum > 0.0f)) threadgroup_barrier(mem_flags::mem_none);
  out[i] = sum;
}
