// Broken on purpose (arithmetic): a row times its length is computed in 32 bits
#include <metal_stdlib>
using namespace metal;

kernel void rows(device float* out [[buffer(0)]], constant int& hidden [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  const int at = int(i) * hidden;
  out[i] = float(at);
}
