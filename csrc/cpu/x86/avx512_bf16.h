// Products of tiles of bfloat16 on processors with AVX512-BF16.
#pragma once
#include "cpu/x86/weight_tiles.h"

namespace moe_metal {

// Adds the products of a pair of k of 16 (or eight) tokens with the same pair of a row of weights.
[[MOE_METAL_BF16, gnu::always_inline]] inline __m512 add_products(__m512 sums, __m512i tokens, __m512i pair) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(tokens), reinterpret_cast<__m512bh>(pair));
}
[[MOE_METAL_BF16, gnu::always_inline]] inline __m256 add_products(__m256 sums, __m256i tokens, __m512i pair) {
  const __m256i same = _mm512_castsi512_si256(pair);
  return _mm256_dpbf16_ps(sums, reinterpret_cast<__m256bh>(tokens), reinterpret_cast<__m256bh>(same));
}

// c[g] = a tile row of weights times token tile g, without AMX: `G` tiles, and with `half` also the first eight tokens
// of the next tile; with `add`, c[g] += it. Eight rows at a time: rows of common sizes all map to one set of the L1
// cache, which has eight ways on many processors; 16 rows took twice as long. The next eight rows are prefetched to the
// L2 cache meanwhile: 128 experts with 16 tokens each take 0.75 to 0.85 of the time without. Instead, ahead(b, part)
// may unpack later chunks: it is called kParts times per chunk b, since the processor does that and products at once.
constexpr int kRowsOfVectors = 8;
constexpr int64_t kParts = 4;
template <int G, bool half, class Ahead = Nothing>
[[MOE_METAL_BF16]] inline void multiply_by_vectors(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                                   int64_t chunks, float (*c)[kTile][kTile], bool add,
                                                   const Ahead& given = Ahead()) {
  constexpr int R = kRowsOfVectors;
  constexpr bool kAlone = std::is_same_v<Ahead, Nothing>;
  const int64_t row = kAlone ? weights.row : kDepth;  // what `ahead` converts is contiguous
  Ahead ahead = given;                                // a copy, which stays in registers
  for (int64_t first = 0; first < kTile; first += R) {
    __m512 sums[R][std::max(G, 1)] = {};
    __m256 rest[R] = {};
    if (add) {
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        MOE_METAL_UNROLL for (int g = 0; g < G; ++g) sums[r][g] = _mm512_loadu_ps(c[g][first + r]);
        if (half) rest[r] = _mm256_loadu_ps(c[G][first + r]);
      }
    }
    if constexpr (!kAlone) ahead.begin(first);
    for (int64_t b = 0; b < chunks; ++b) {
      const at::BFloat16* rows = weights.data + (b & weights.ring) * weights.chunk + first * row;
      if constexpr (kAlone) {
        MOE_METAL_UNROLL for (int r = R; r < 2 * R; ++r) __builtin_prefetch(rows + r * row, 0, 2);
      }
      for (int64_t k = 0; k < kDepth; k += 2) {
        if (k % (kDepth / kParts) == 0) ahead(b, k / (kDepth / kParts));
        const at::BFloat16* here = tokens + b * kTileSize + k * kTile;
        __m512i x[std::max(G, 1)];
        __m256i x_of_half;
        MOE_METAL_UNROLL for (int g = 0; g < G; ++g) x[g] = _mm512_loadu_si512(here + g * size);
        if (half) std::memcpy(&x_of_half, here + G * size, sizeof(x_of_half));
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          int pair;
          std::memcpy(&pair, rows + r * row + k, sizeof(pair));
          const __m512i pairs = _mm512_set1_epi32(pair);
          MOE_METAL_UNROLL for (int g = 0; g < G; ++g) sums[r][g] = add_products(sums[r][g], x[g], pairs);
          if (half) rest[r] = add_products(rest[r], x_of_half, pairs);
        }
      }
    }
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int g = 0; g < G; ++g) _mm512_storeu_ps(c[g][first + r], sums[r][g]);
      if (half) _mm512_storeu_ps(c[G][first + r], _mm512_zextps256_ps512(rest[r]));
    }
  }
}

}  // namespace moe_metal
