// Broken on purpose (barrier): threads beyond the end return before the barrier
#include <metal_stdlib>
using namespace metal;

kernel void early(device float* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                  uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[64];
  if (tid >= count) return;
  x[tid] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = x[tid];
}
