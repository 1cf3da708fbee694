// Broken on purpose (uninitialized): relies on the threadgroup memory of the previous threadgroup
#include <metal_stdlib>
using namespace metal;

kernel void left_over(device float* out [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]], uint i [[thread_position_in_grid]]) {
  threadgroup float x[32];
  if (group == 0) x[tid] = 1.0f;
  out[i] = x[tid];
}
