// Broken on purpose (uninitialized with fewer threads, race with more threadgroups): assumes a single threadgroup of 256
#include <metal_stdlib>
using namespace metal;

kernel void add_mean_square(device float* residual [[buffer(0)]], device const float* x [[buffer(1)]],
                            constant uint& hidden [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  float sum = 0;
  for (uint i = tid; i < hidden; i += 256) {
    residual[i] += x[i];
    sum += residual[i] * residual[i];
  }
  sum = simd_sum(sum);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0;
  for (uint i = 0; i < 8; ++i) total += partial[i];
  for (uint i = tid; i < hidden; i += 256) residual[i] *= rsqrt(total / float(hidden));
}
