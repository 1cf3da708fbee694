// Broken on purpose (barrier): each half of the threads waits at a different barrier
#include <metal_stdlib>
using namespace metal;

kernel void branches(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[64];
  x[tid] = 1.0f;
  if (tid < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[tid] = x[tid + 32];
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[tid] = x[tid - 32];
  }
}
