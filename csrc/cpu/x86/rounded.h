// Converts packed numbers to bfloat16 for products of tiles.
#pragma once
#include <bit>

#include "cpu/x86/e4m3_dots.h"
#include "cpu/x86/formats/codes.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {
namespace {  // internal linkage, so that the compiler can specialise functions for their calls

[[MOE_METAL_BF16, gnu::always_inline]] inline __m512i both(const Vec& low, const Vec& high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Rounds blocks of 32 columns of a row to bfloat16. Codes of up to 5 bits are looked up in a table of the values of all
// codes, which is rounded once for each scale.
template <class Read>
class Rounded {
 public:
  // Prepares the conversion of rows with these scales, if it needs that. -> whether they can be converted
  static bool prepare(const float*, int64_t, int64_t, int64_t) { return true; }
  // Writes N blocks from a column on to N tiles. `scale` and `offset` are those of the first column; Group columns
  // share one (64 means at least 64).
  template <int N, int Group>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const uint8_t* row, int64_t column, const float* scale,
                                                           const float* offset, at::BFloat16* to) const {
    Vec scales[2 * N], offsets[2 * N];  // of each 16 columns
    MOE_METAL_UNROLL for (int i = 0; i < 2 * N; ++i) {
      scales[i] = Vec(scale[i * kLanes / Group]), offsets[i] = Vec(offset[i * kLanes / Group]);
    }
    // Stores come last, since the compiler must not move loads of scales past them.
    __m512i out[N];
    if constexpr (looks_up(Group)) {
      __m512i values;
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n, column += kDepth) {
        if (n == 0 || Group <= kDepth) values = table<Group>(scales + 2 * n, offsets + 2 * n);
        const __m512i words = Read::words(row, column);
        out[n] = _mm512_permutexvar_epi16(Group < kDepth ? with_half(words) : words, values);
      }
    } else {
      Vec codes[2 * N];
      if constexpr (requires { Read::vectors(row, column, codes); }) {
        Read::vectors(row, column, codes);
      } else {
        MOE_METAL_UNROLL for (int i = 0; i < 2 * N; ++i) codes[i] = Read::vector(row, column + i * kLanes, Whole());
      }
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) out[n] = scaled(codes + 2 * n, scales + 2 * n, offsets + 2 * n);
    }
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) _mm512_storeu_si512(to + n * kTileSize, out[n]);
  }

 private:
  static constexpr bool kFewBits = Read::kBytes * 8 < 5 * Read::kColumns;  // at most 4

  static Vec scaled(const Vec& codes, const Vec& scale, const Vec& offset) {
    return Read::kOffset ? at::vec::fmadd(codes, scale, offset) : codes * scale;
  }
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i scaled(const Vec* codes, const Vec* scales,
                                                                      const Vec* offsets) {
    return both(scaled(codes[0], scales[0], offsets[0]), scaled(codes[1], scales[1], offsets[1]));
  }
  static constexpr bool looks_up(int group) {
    return requires { Read::words(nullptr, 0); } && (kFewBits || group >= kDepth);
  }
  // The table has 32 values, of which only the first 16 are computed if the others are the same; or 16 for each half of
  // the columns if the halves have different scales.
  template <int Group>
  [[MOE_METAL_BF16, gnu::always_inline]] static inline __m512i table(const Vec* scales, const Vec* offsets) {
    if constexpr (kFewBits && Group >= kDepth) {
      const __m256bh half = _mm512_cvtneps_pbh(scaled(Read::values(0), scales[0], offsets[0]));
      return _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(half));
    }
    const Vec codes[2] = {Read::values(0), Read::values(Group < kDepth ? 0 : 1)};
    return scaled(codes, scales, offsets);
  }
  // Bit 4 is the half of the columns that a code is in.
  static __m512i with_half(__m512i codes) {
    return with_bit<4>(_mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1), codes);
  }
};

// Loads N times 32 e4m3, in the order for which EightBits returns them in order.
template <int N>
[[gnu::always_inline]] inline __m512i in_order(const uint8_t* from) {
  const __m512i bytes = N == 2 ? _mm512_loadu_si512(from)
                               : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}

// mxfp8: scales are powers of two, which are added to the exponents.
template <>
class Rounded<x86::E4m3Groups> {
 public:
  // The products must be normal numbers.
  bool prepare(const float* scales, int64_t rows, int64_t step, int64_t groups) {
    constexpr uint32_t kOne = 127, kRange = 9;  // the exponent of 1; magnitudes are below 2^kRange and above 2^-kRange
    scales_ = scales;
    exponents_.resize((rows - 1) * step + groups);
    uint32_t least = kOne, most = kOne, *to = exponents_.data();
    for (int64_t r = 0; r < rows; ++r, scales += step, to += step) {
      for (int64_t g = 0; g < groups; ++g) {
        const uint32_t exponent = std::bit_cast<uint32_t>(scales[g]) >> 23;
        least = std::min(least, exponent), most = std::max(most, exponent);
        to[g] = ((exponent - kOne) << 7 & 0xffff) * 0x10001;
      }
    }
    return least > kRange && most < 2 * kOne - kRange;
  }
  template <int N, int Group>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const uint8_t* row, int64_t column, const float* scale,
                                                           const float*, at::BFloat16* to) const {
    static_assert(Group == kDepth);
    const uint32_t* exponents = exponents_.data() + (scale - scales_);
    __m512i out[2];
    numbers_(in_order<N>(row + column), out);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      // 0 and NaN, all of whose bits are set, are left.
      const __m512i next = _mm512_add_epi16(out[n], _mm512_set1_epi16(1));
      const __mmask32 others = _mm512_test_epi16_mask(next, _mm512_set1_epi16(0x7ffe));
      const __m512i exponent = _mm512_set1_epi32(static_cast<int>(exponents[n]));
      _mm512_storeu_si512(to + n * kTileSize, _mm512_mask_add_epi16(out[n], others, out[n], exponent));
    }
  }

 private:
  EightBits numbers_;
  const float* scales_ = nullptr;
  std::vector<uint32_t> exponents_;  // of the scales, in the place of a bfloat16's, twice
};

// fp8: a table of scaled magnitudes for each 128 columns. 128 rows share them, so most tile rows find theirs prepared.
template <>
class Rounded<x86::E4m3Blocks> {
 public:
  // The rows must have the same scales.
  bool prepare(const float* scales, int64_t rows, int64_t step, int64_t groups) {
    for (int64_t r = 1; r < rows; ++r) {
      if (std::memcmp(scales + r * step, scales, groups * sizeof(float)) != 0) return false;
    }
    tables_.resize(groups);
    for (int64_t g = 0; g < groups; ++g) {
      if (tables_[g].scale != std::bit_cast<uint32_t>(scales[g])) tables_[g] = table(scales[g]);
    }
    return true;
  }
  template <int N, int Group>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const uint8_t* row, int64_t column, const float*,
                                                           const float*, at::BFloat16* to) const {
    __m512i out[2];
    tables_[column / x86::E4m3Blocks::kGroup].numbers(in_order<N>(row + column), out);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) _mm512_storeu_si512(to + n * kTileSize, out[n]);
  }

 private:
  struct Table {
    EightBits numbers;
    int64_t scale = -1;  // its bits
  };

  [[MOE_METAL_BF16]] static Table table(float scale) {
    alignas(64) at::BFloat16 magnitudes[128];
    uint8_t codes[kDepth];
    for (int first = 0; first < 128; first += kDepth) {
      for (int i = 0; i < kDepth; ++i) codes[i] = static_cast<uint8_t>(first + i);
      const Vec low = E4m3::vector(codes, Whole()) * Vec(scale),
                high = E4m3::vector(codes + kLanes, Whole()) * Vec(scale);
      _mm512_store_si512(magnitudes + first, both(low, high));
    }
    return {EightBits(magnitudes), std::bit_cast<uint32_t>(scale)};
  }

  std::vector<Table> tables_;
};

}  // namespace
}  // namespace moe_metal
