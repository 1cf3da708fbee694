// Broken on purpose (simdgroup): lanes at the end of the row leave the loop before the others
#include <metal_stdlib>
using namespace metal;

kernel void sums(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint& count [[buffer(2)]], uint tid [[thread_index_in_threadgroup]]) {
  float sum = 0;
  for (uint i = tid; i < count; i += 32) sum += simd_sum(x[i]);
  if (tid == 0) out[0] = sum;
}
