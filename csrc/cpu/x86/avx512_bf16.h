// Products of tiles of bfloat16 on processors with AVX512-BF16.
#pragma once
#include "cpu/x86/weight_tiles.h"

namespace moe_metal {

// Adds the products of a pair of k of 16 (or eight) tokens with the same pair of a row of weights.
[[MOE_METAL_BF16, gnu::always_inline]] inline __m512 add_products(__m512 sums, const at::BFloat16* tokens, int pair) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(_mm512_loadu_si512(tokens)),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}
[[MOE_METAL_BF16, gnu::always_inline]] inline __m256 add_products(__m256 sums, const at::BFloat16* tokens, int pair) {
  const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens));
  return _mm256_dpbf16_ps(sums, reinterpret_cast<__m256bh>(eight), reinterpret_cast<__m256bh>(_mm256_set1_epi32(pair)));
}
inline __m512 sixteen(__m512 sums) { return sums; }
inline __m512 sixteen(__m256 sums) { return _mm512_zextps256_ps512(sums); }

// c[g] = a strip of weights times token tile g, without AMX; with `add`, c[g] += it. Sums is __m256 for a single tile
// with at most eight tokens, otherwise __m512. Eight rows at a time: rows of common sizes all map to one set of the L1
// cache, which has eight ways on many processors; 16 rows took twice as long. The next eight rows are prefetched to the
// L2 cache meanwhile: 128 experts with 16 tokens each take 0.75 to 0.85 of the time without.
template <int G, class Sums>
[[MOE_METAL_BF16]] inline void multiply_by_vectors(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                                   int64_t blocks, float (*c)[kTile][kTile], bool add) {
  constexpr int R = 8;
  for (int64_t first = 0; first < kTile; first += R) {
    Sums sums[R][G] = {};
    if (add) {
      MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) {
        std::memcpy(&sums[i / G][i % G], c[i % G][first + i / G], sizeof(Sums));
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const at::BFloat16* rows = weights.data + b * weights.block + first * weights.row;
      MOE_METAL_UNROLL for (int r = R; r < 2 * R; ++r) __builtin_prefetch(rows + r * weights.row, 0, 2);
      for (int64_t k = 0; k < kDepth; k += 2) {
        const at::BFloat16* here = tokens + b * kTileSize + k * kTile;
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          int pair;
          std::memcpy(&pair, rows + r * weights.row + k, sizeof(pair));
          MOE_METAL_UNROLL for (int g = 0; g < G; ++g) sums[r][g] = add_products(sums[r][g], here + g * size, pair);
        }
      }
    }
    MOE_METAL_UNROLL for (int i = 0; i < R * G; ++i) {
      _mm512_storeu_ps(c[i % G][first + i / G], sixteen(sums[i / G][i % G]));
    }
  }
}

}  // namespace moe_metal
