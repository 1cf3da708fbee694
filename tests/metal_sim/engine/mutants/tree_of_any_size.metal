// Broken on purpose (wrong result): the tree drops elements unless the threads are a power of two
#include <metal_stdlib>
using namespace metal;

kernel void tree(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint tid [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float shared[1024];
  shared[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_size = threads / 2; half_size > 0; half_size /= 2) {
    if (tid < half_size) shared[tid] += shared[tid + half_size];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (tid == 0) out[0] = shared[0];
}
