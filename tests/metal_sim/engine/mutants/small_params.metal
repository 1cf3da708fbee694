// Broken on purpose (argument): the host binds a smaller struct than the kernel reads
#include <metal_stdlib>
using namespace metal;

struct Params {
  uint count;
  float scale;
  float shift;
};
kernel void affine(device float* out [[buffer(0)]], constant Params& p [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  if (i < p.count) out[i] = out[i] * p.scale + p.shift;
}
