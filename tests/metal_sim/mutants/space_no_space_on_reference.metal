// Broken on purpose (address space): a reference to device memory without its address space
#include <metal_stdlib>
using namespace metal;

struct Params {
  float scale;
};
float scaled(const Params& p, float x) { return p.scale * x; }
kernel void k(device float* out [[buffer(0)]], constant Params& p [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  out[i] = scaled(p, out[i]);
}
