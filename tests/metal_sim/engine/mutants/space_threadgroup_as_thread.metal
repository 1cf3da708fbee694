// Broken on purpose (address space): a threadgroup pointer is passed where a thread pointer is required
#include <metal_stdlib>
using namespace metal;

float first(thread const float* x) { return x[0]; }
kernel void k(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[32];
  x[tid] = 1.0f;
  out[tid] = first(x + tid);
}
