// Broken on purpose (time): the loop waits for a flag that is never set
#include <metal_stdlib>
using namespace metal;

kernel void endless(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  uint n = 1;
  while (n != 0) n = n * 3 | 1;
  out[i] = float(n);
}
