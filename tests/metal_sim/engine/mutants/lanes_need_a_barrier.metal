// Broken on purpose (race): lanes of a simdgroup exchange through memory without simdgroup_barrier
#include <metal_stdlib>
using namespace metal;

kernel void swap(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[32];
  x[tid] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = float(tid);
  out[tid] = x[tid ^ 1];
}
