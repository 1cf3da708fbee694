// Broken on purpose (race): threadgroups overlap by one element, and write the same value there
#include <metal_stdlib>
using namespace metal;

kernel void overlap(device float* out [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]]) {
  out[group * 31 + tid] = 1.0f;
}
