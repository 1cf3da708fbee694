// Packed numbers, rounded to bfloat16 for products of tiles.
#pragma once
#include <bit>

#include "cpu/x86/e4m3_dots.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {
namespace {  // so that a compiler knows all calls of a function and may specialise it

[[MOE_METAL_BF16, gnu::always_inline]] inline __m512i both(const Vec& low, const Vec& high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Numbers with one scale and offset, rounded to bfloat16, 32 at a time. Those of 4 bits are looked up.
template <class Read>
class Rounded {
 public:
  [[MOE_METAL_BF16, gnu::always_inline]] inline void set(const Read& read, float scale, float offset) {
    scale_ = scale, offset_ = offset;
    if constexpr (kLooksUp) {
      const auto values = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(scaled(read.codes.few())));
      values_ = _mm512_inserti64x4(_mm512_castsi256_si512(values), values, 1);
    }
  }
  // For later rows, where it lasts.
  static void keep(Rounded&) {}
  // N blocks of a row from a column on, to N tiles.
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const Read& read, const uint8_t* row, int64_t column,
                                                           at::BFloat16* to) const {
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      _mm512_storeu_si512(to + n * kTileSize, block(read, row, column + n * kDepth));
    }
  }

 private:
  static constexpr bool kLooksUp = Read::kColumns * 4 == Read::kBytes * 8;  // 4 bits, one after the other

  [[MOE_METAL_BF16, gnu::always_inline]] inline __m512i block(const Read& read, const uint8_t* row,
                                                              int64_t column) const {
    if constexpr (kLooksUp) {  // by 5 bits, of which the last is the next number's
      const auto* from = reinterpret_cast<const __m128i*>(row + column / 2);
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
      return _mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), values_);
    } else {
      return both(scaled(read(row, column, Whole())), scaled(read(row, column + kLanes, Whole())));
    }
  }
  [[gnu::always_inline]] Vec scaled(const Vec& codes) const {
    if constexpr (Read::kOffset) return at::vec::fmadd(codes, scale_, offset_);
    return codes * scale_;
  }

  Vec scale_, offset_;
  __m512i values_;
};

// e4m3 by its magnitudes' bytes, of which each scale, one for 128 rows and columns, has its own.
template <class Read>
  requires Read::kScalesAreRare
class Rounded<Read> {
 public:
  [[gnu::always_inline]] void set(const Read& read, float scale, float) {
    if (std::bit_cast<uint32_t>(scale) != last_) renew(read, scale);
  }
  [[gnu::always_inline]] void keep(Rounded& rounded) const {
    if (last_ != rounded.last_) rounded = *this;
  }
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const Read&, const uint8_t* row, int64_t column,
                                                           at::BFloat16* to) const {
    const uint8_t* from = row + column;
    // The halves of eight bytes apart, which come out side by side.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = N == 2 ? _mm512_loadu_si512(from)
                                 : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    __m512i out[2];
    numbers_(_mm512_permutexvar_epi64(order, bytes), out);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) _mm512_storeu_si512(to + n * kTileSize, out[n]);
  }

 private:
  [[MOE_METAL_BF16, gnu::noinline]] void renew(const Read& read, float scale) {
    last_ = std::bit_cast<uint32_t>(scale);
    alignas(64) at::BFloat16 magnitudes[128];
    uint8_t codes[kDepth];
    for (int first = 0; first < 128; first += kDepth) {
      for (int i = 0; i < kDepth; ++i) codes[i] = static_cast<uint8_t>(first + i);
      const Vec low = read(codes, 0, Whole()) * Vec(scale), high = read(codes, kLanes, Whole()) * Vec(scale);
      _mm512_store_si512(magnitudes + first, both(low, high));
    }
    numbers_ = EightBits(magnitudes);
  }

  EightBits numbers_;
  int64_t last_ = -1;  // the bits of the last scale
};

}  // namespace
}  // namespace moe_metal
