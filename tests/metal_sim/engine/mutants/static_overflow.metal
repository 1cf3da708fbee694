// Broken on purpose (bounds): the second of two threadgroup arrays is reached through the first
#include <metal_stdlib>
using namespace metal;

kernel void overflow(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  second[tid] = 1.0f;
  first[tid + 1] = float(tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = first[tid] + second[tid];
}
