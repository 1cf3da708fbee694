// Broken on purpose (wrong result): the sums of threads above count overwrite exponentials, in every order
#include <metal_stdlib>
using namespace metal;

// One threadgroup of 64: softmax of `count` logits.
kernel void softmax(device const float* logits [[buffer(0)]], device float* out [[buffer(1)]],
                    constant uint& count [[buffer(2)]], threadgroup float* shared [[threadgroup(0)]],
                    uint tid [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  float best = -INFINITY;
  for (uint i = tid; i < count; i += threads) best = max(best, logits[i]);
  shared[tid] = best;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_size = threads / 2; half_size > 0; half_size /= 2) {
    if (tid < half_size) shared[tid] = max(shared[tid], shared[tid + half_size]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const float largest = shared[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint i = tid; i < count; i += threads) {
    const float e = exp(logits[i] - largest);
    shared[count + i] = e;
    sum += e;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[tid] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_size = threads / 2; half_size > 0; half_size /= 2) {
    if (tid < half_size) shared[tid] += shared[tid + half_size];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = tid; i < count; i += threads) out[i] = shared[count + i] / shared[0];
}
