// Broken on purpose (uninitialized): only even threads write, all read
#include <metal_stdlib>
using namespace metal;

kernel void half_written(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[64];
  if (tid % 2 == 0) x[tid] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = x[tid];
}
