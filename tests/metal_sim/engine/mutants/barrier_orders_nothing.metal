// Broken on purpose (race): the barrier has mem_none, so it orders no memory
#include <metal_stdlib>
using namespace metal;

kernel void swap(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[64];
  x[tid] = float(tid);
  threadgroup_barrier(mem_flags::mem_none);
  out[tid] = x[63 - tid];
}
