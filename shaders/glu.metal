// output = act(gate) * up
//
// gate, up [outer, middle, inner] with any strides; output [outer, middle, inner], contiguous.
// Grid: one thread for each chunk of four neighbours of `inner`, flattened.
#include <metal_stdlib>
using namespace metal;

#include "activation.h"
#include "rows.h"

namespace moe_metal {

inline float4 activated4(float4 gate, float4 up, ActivationParams params) {
  return float4(activated(gate.x, up.x, params), activated(gate.y, up.y, params), activated(gate.z, up.z, params),
                activated(gate.w, up.w, params));
}

inline ulong offset_of(GluStrides strides, ulong outer, ulong middle, ulong inner) {
  return outer * strides.outer + middle * strides.middle + inner * strides.inner;
}

template <typename T>
[[kernel]] void glu(device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]],
                    device T* output [[buffer(2)]], constant GluParams& params [[buffer(3)]],
                    uint thread_index [[thread_position_in_grid]]) {
  if (thread_index >= params.all_chunks) return;
  const uint row = thread_index / params.chunks;
  const ulong i = ulong(kVectorWidth) * (thread_index % params.chunks);
  gate += offset_of(params.gate, row / params.middle, row % params.middle, i);
  up += offset_of(params.up, row / params.middle, row % params.middle, i);
  output += row * params.inner + i;

  if (params.access == GluAccess::strided || i + kVectorWidth > params.inner) {
    for (uint n = 0; n < min(ulong(kVectorWidth), params.inner - i); ++n) {
      const float g = float(gate[n * params.gate.inner]), u = float(up[n * params.up.inner]);
      output[n] = T(activated(g, u, params.activation));
    }
    return;
  }
  float4 g = load4_aligned(gate), u;
  if (params.access == GluAccess::contiguous) {
    u = load4_aligned(up);
  } else {
    const float4 next = load4_aligned(gate + kVectorWidth);
    u = float4(g.y, g.w, next.y, next.w);
    g = float4(g.x, g.z, next.x, next.z);
  }
  store4_aligned(output, activated4(g, u, params.activation));
}

}  // namespace moe_metal

instantiate_dtypes("glu", glu)
