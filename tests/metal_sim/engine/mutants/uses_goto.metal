// Broken on purpose (compile): Metal has no goto
#include <metal_stdlib>
using namespace metal;

kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i > 3) goto end;
  x[i] = 0.0f;
end:;
}
