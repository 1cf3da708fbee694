// Broken on purpose (compile): 33 KB
#include <metal_stdlib>
using namespace metal;

kernel void large(device float* out [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float x[8448];
  x[tid] = 1.0f;
  out[tid] = x[tid];
}
