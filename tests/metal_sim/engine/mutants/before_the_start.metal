// Broken on purpose (bounds): an unsigned index wraps below zero
#include <metal_stdlib>
using namespace metal;

kernel void shift(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = x[long(i) - 1];
}
