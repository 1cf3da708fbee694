// Broken on purpose (race): reads what another threadgroup writes
#include <metal_stdlib>
using namespace metal;

kernel void neighbour(device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                      uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  x[i] = 1.0f;
  out[i] = x[(i + 32) % n];
}
