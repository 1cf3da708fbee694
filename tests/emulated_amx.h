// The AMX instructions that csrc/cpu/x86 uses, emulated for any processor with AVX-512. Tiles are ordinary memory.
//
// Included after <immintrin.h>. All tiles have 16 rows of 64 bytes, as TileShapes configures them. Sums are float, as
// in the processor, but its order within a pair and its flushing of denormal numbers are not emulated.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace emulated_amx {

constexpr int kRows = 16, kBytes = 64;
inline thread_local uint8_t tiles[8][kRows][kBytes];

inline void load(int tile, const void* from, int64_t stride) {
  for (int r = 0; r < kRows; ++r) std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, kBytes);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < kRows; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], kBytes);
}

inline float element(int tile, int r, int i) {
  uint16_t bits;
  std::memcpy(&bits, tiles[tile][r] + 2 * i, sizeof(bits));
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// c[r][n] += sum over k of a(r, k) * b(k, n), where b has a pair of k side by side
inline void multiply(int c, int a, int b) {
  float right[kRows][2 * kRows];
  for (int p = 0; p < kRows; ++p) {
    for (int i = 0; i < 2 * kRows; ++i) right[p][i] = element(b, p, i);
  }
  for (int r = 0; r < kRows; ++r) {
    float sums[kRows];
    std::memcpy(sums, tiles[c][r], kBytes);
    for (int p = 0; p < kRows; ++p) {
      const float first = element(a, r, 2 * p), second = element(a, r, 2 * p + 1);
      for (int n = 0; n < kRows; ++n) sums[n] += first * right[p][2 * n] + second * right[p][2 * n + 1];
    }
    std::memcpy(tiles[c][r], sums, kBytes);
  }
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) static_cast<void>(from)
#define _tile_storeconfig(to) static_cast<void>(to)
#define _tile_loadd(tile, from, stride) emulated_amx::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_amx::store(tile, to, stride)
#define _tile_zero(tile) std::memset(emulated_amx::tiles[tile], 0, sizeof(emulated_amx::tiles[tile]))
#define _tile_dpbf16ps(c, a, b) emulated_amx::multiply(c, a, b)
