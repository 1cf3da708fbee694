// Broken on purpose (simdgroup): reads lane 32
#include <metal_stdlib>
using namespace metal;

kernel void next_lane(device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  out[lane] = simd_shuffle(float(lane), ushort(lane + 1));
}
