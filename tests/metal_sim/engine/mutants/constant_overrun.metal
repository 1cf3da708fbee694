// Broken on purpose (bounds): reads an element that setBytes did not bind
#include <metal_stdlib>
using namespace metal;

kernel void scale(constant float* factors [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = factors[i];
}
