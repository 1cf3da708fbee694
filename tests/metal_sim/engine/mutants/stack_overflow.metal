// Broken on purpose (stack): eight places for the best, top_k is nine
#include <metal_stdlib>
using namespace metal;

kernel void top(device const float* logits [[buffer(0)]], device float* out [[buffer(1)]],
                constant uint& top_k [[buffer(2)]], uint tid [[thread_position_in_grid]]) {
  float best[8];
  for (uint k = 0; k < top_k; ++k) best[k] = logits[tid + k];
  float sum = 0;
  for (uint k = 0; k < top_k; ++k) sum += best[k];
  out[tid] = sum;
}
