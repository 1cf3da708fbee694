// Broken on purpose (simdgroup): lanes meet at two different functions
#include <metal_stdlib>
using namespace metal;

kernel void either(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint tid [[thread_index_in_threadgroup]]) {
  out[tid] = tid < 16 ? simd_sum(x[tid]) : simd_max(x[tid]);
}
