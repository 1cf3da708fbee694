// Shared by the two kernels of the op attention: the scale of a row's sums, and the memory of the parts' results.
#pragma once
#include "rows.h"

namespace moe_metal {

// The value that is subtracted from scores: `highest`, or 0 if no key has been seen.
inline float2 offset_of(float2 highest) {
  return float2(highest.x == -INFINITY ? 0 : highest.x, highest.y == -INFINITY ? 0 : highest.y);
}

// The factor of a row's sums, with the sink of its head: 0 if the row sees no key.
template <typename T>
float sums_factor(float highest, float total, uint head, device const T* sinks, constant AttentionParams& params) {
  if (total == 0) return 0;
  if (params.sinks == ParameterType::absent) return 1 / total;
  const float sink = load(sinks, head, params.sinks), most = sink > highest ? sink : highest;
  const float offset = offset_of(most).x, scale = exp(highest - offset);
  return scale / (total * scale + exp(sink - offset));
}

// The columns of a part's sums in memory: whole vectors.
inline uint part_columns(constant AttentionParams& params) {
  return (params.V + kVectorWidth - 1) / kVectorWidth * kVectorWidth;
}

}  // namespace moe_metal
