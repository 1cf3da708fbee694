// Products of tiles of bfloat16 on processors with AVX512-BF16.
#pragma once
#include "cpu/x86/weight_tiles.h"

namespace moe_metal {

// c[g] += a strip of weights times token tile g, without AMX: a vector holds a pair of k of 16 tokens, and meets the
// same pair of each row of weights.
template <int G>
[[MOE_METAL_BF16]] inline void multiply_by_vectors(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                                   int64_t blocks, float (*c)[kTile][kTile]) {
  constexpr int R = 16 / G;  // rows whose sums are in registers
  for (int64_t first = 0; first < kTile; first += R) {
    __m512 sums[R][G];
    MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) sums[i / G][i % G] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
      const at::BFloat16* rows = weights.data + b * weights.block + first * weights.row;
      for (int64_t pair = 0; pair < kTile; ++pair) {
        __m512i token[G];
        MOE_METAL_UNROLL for (int g = 0; g < G; ++g) {
          token[g] = _mm512_loadu_si512(tokens + g * size + b * kTileSize + pair * kDepth);
        }
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          int32_t both;
          std::memcpy(&both, rows + r * weights.row + 2 * pair, sizeof(both));
          const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
          MOE_METAL_UNROLL for (int g = 0; g < G; ++g) {
            sums[r][g] = _mm512_dpbf16_ps(sums[r][g], reinterpret_cast<__m512bh>(token[g]), weight);
          }
        }
      }
    }
    MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) _mm512_storeu_ps(c[i % G][first + i / G], sums[i / G][i % G]);
  }
}

}  // namespace moe_metal
