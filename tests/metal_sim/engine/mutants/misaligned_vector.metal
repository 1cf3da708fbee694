// Broken on purpose (alignment): rows of an odd length make float4 start anywhere
#include <metal_stdlib>
using namespace metal;

kernel void rows(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint& columns [[buffer(2)]], uint row [[thread_position_in_grid]]) {
  device const float4* in = (device const float4*)(x + row * columns);
  out[row] = in[0].x;
}
