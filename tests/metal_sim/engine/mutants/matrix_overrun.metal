// Broken on purpose (bounds): the last matrix of the row is not whole
#include <metal_stdlib>
using namespace metal;

kernel void load(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint& columns [[buffer(2)]]) {
  for (uint column = 0; column < columns; column += 8) {
    simdgroup_float8x8 a;
    simdgroup_load(a, x + column, columns);
    simdgroup_store(a, out + column, 24);
  }
}
