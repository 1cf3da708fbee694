// Broken on purpose (simdgroup): each lane loads another matrix
#include <metal_stdlib>
using namespace metal;

kernel void load(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 a, b;
  simdgroup_load(a, x + lane % 2, 8);
  simdgroup_multiply(b, a, a);
  simdgroup_store(b, out, 8);
}
