// Broken on purpose (bounds): the last float4 reaches past the end
#include <metal_stdlib>
using namespace metal;

kernel void copy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i * 4 < count) *(device float4*)&out[i * 4] = *(device const float4*)&x[i * 4];
}
