// Broken on purpose (bounds): no check of i against the length
#include <metal_stdlib>
using namespace metal;

kernel void copy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
}
