// Broken on purpose (compile): vectors of different types do not mix
#include <metal_stdlib>
using namespace metal;

kernel void k(device float4* x [[buffer(0)]], device half4* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  x[i] = x[i] + y[i];
}
