// Broken on purpose (time): all lanes loop forever
#include <metal_stdlib>
using namespace metal;

kernel void endless(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float sum = 1.0f;
  while (simd_any(sum > 0.0f)) threadgroup_barrier(mem_flags::mem_none);
  out[i] = sum;
}
