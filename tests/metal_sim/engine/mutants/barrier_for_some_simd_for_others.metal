// Broken on purpose (simdgroup): some lanes wait at a barrier, the others at simd_sum
#include <metal_stdlib>
using namespace metal;

kernel void mixed(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  float v = 1.0f;
  if (tid < 16) threadgroup_barrier(mem_flags::mem_threadgroup);
  else v = simd_sum(v);
  out[tid] = v;
}
