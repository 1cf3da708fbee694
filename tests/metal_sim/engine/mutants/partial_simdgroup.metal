// Broken on purpose (simdgroup): 48 threads: the second simdgroup is half empty
#include <metal_stdlib>
using namespace metal;

kernel void sums(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint tid [[thread_index_in_threadgroup]]) {
  out[tid] = simd_sum(x[tid]);
}
