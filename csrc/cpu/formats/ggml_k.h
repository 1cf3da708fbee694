// GGML's blocks of 256 columns: a factor in float16, perhaps one of the offsets, and a few bits of scale, and of
// offset, for each group.
#pragma once
#include "cpu/formats/ggml_32.h"

namespace moe_metal {

template <int bytes, int group, bool has_offset, int middle>
struct BlocksOf256 {
  static constexpr int kColumns = 256, kBytes = bytes, kGroup = group, kGroups = 256 / group, kMiddle = middle;
  static constexpr bool kOffset = has_offset;
  static constexpr float kUnit = 1;
  static constexpr int number(int code) { return code; }
#ifdef MOE_METAL_HAS_AVX512
  static const uint8_t* block_of(const uint8_t* row, int64_t chunk) { return row + chunk / 2 * kBytes; }
#endif
};

// to[g] = factor * scale[g] for the groups of a block.
inline void scaled_by(float factor, const std::array<int8_t, 8>& scale, float* to) {
#ifdef MOE_METAL_HAS_AVX2  // of which compilers make eight conversions
  const __m256i integers = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(std::bit_cast<int64_t>(scale)));
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(factor)));
#else
  for (int g = 0; g < 8; ++g) to[g] = factor * static_cast<float>(scale[g]);
#endif
}
inline void scaled_by(float factor, const std::array<int8_t, 16>& scale, float* to) {
  const auto halves = std::bit_cast<std::array<std::array<int8_t, 8>, 2>>(scale);
  for (int half = 0; half < 2; ++half) scaled_by(factor, halves[half], to + 8 * half);
}

#ifdef MOE_METAL_HAS_AVX512
// Of each quarter its own shift, and `more` of all. Bits of neighbouring bytes come in from above.
template <int a, int b, int c, int d>
inline __m512i quarters_shifted(__m512i bytes, int more = 0) {
  const auto of = [](int shift) { return static_cast<int64_t>(shift * 0x0001000100010001LL); };
  const __m512i shifts = _mm512_setr_epi64(of(a), of(a), of(b), of(b), of(c), of(c), of(d), of(d));
  return _mm512_srlv_epi16(bytes, _mm512_add_epi16(shifts, _mm512_set1_epi16(static_cast<int16_t>(more))));
}
// The 4-bit codes of 128 columns in runs of 32, of which two lie in the halves of the same bytes.
inline void nibbles_in_runs(const uint8_t* from, __m512i (&to)[2]) {
  const __m512i all = load_512(from);
  to[0] = low_nibbles(quarters_shifted<0, 4, 0, 4>(_mm512_shuffle_i64x2(all, all, 0xa0)));
  to[1] = low_nibbles(quarters_shifted<0, 4, 0, 4>(_mm512_shuffle_i64x2(all, all, 0xf5)));
}
// The same of 32 columns, as words.
inline __m512i words_in_runs(const uint8_t* codes, int64_t column) {
  return words_shifted(load_256(codes + column / 64 * 32), column / 32 % 2 * 4);
}
#endif

// 4 bits: the low halves of 32 bytes are a run of 32 columns, the high ones the next.
inline Bytes nibbles_in_runs(const uint8_t* codes, int64_t column) {
  const Bytes both = load_bytes(codes + column / 64 * 32 + column % 32);
  return column / 32 % 2 ? both >> 4 : both & 15;
}

// Of a row of blocks that begin with both factors, and 6 bits of scale and of offset for each of 8 groups in 12 bytes.
template <int bytes>
inline void six_bit_scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
  for (int64_t b = 0; b < blocks; ++b, row += bytes, scale += 8, offset += 8) {
    // Four groups in each word: 6 bits of the first four, and their highest two are those of the others.
    const uint32_t first = load_word(row + 4), second = load_word(row + 8), low = load_word(row + 12);
    const auto integers = [](uint32_t of_first, uint32_t of_others) {
      const uint32_t others = of_others | (of_first >> 6 & 0x03030303) << 4;
      return std::bit_cast<std::array<int8_t, 8>>((of_first & 0x3f3f3f3f) | uint64_t{others} << 32);
    };
    scaled_by(half_at(row), integers(first, low & 0x0f0f0f0f), scale);
    scaled_by(-half_at(row + 2), integers(second, low >> 4 & 0x0f0f0f0f), offset);
  }
}

struct Q4_K : BlocksOf256<144, 32, true, 8> {
  static constexpr int kBits = 4;
  static Bytes codes(const uint8_t* block, int64_t column) { return nibbles_in_runs(block + 16, column); }
  static constexpr auto scales = six_bit_scales<144>;
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf32;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    nibbles_in_runs(block_of(row, chunk) + 16 + chunk % 2 * 64, to);
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_in_runs(block + 16, column); }
#endif
};

struct Q5_K : BlocksOf256<176, 32, true, 16> {
  static constexpr int kBits = 5;
  static Bytes codes(const uint8_t* block, int64_t column) {
    const Bytes high = load_bytes(block + 16 + column % 32) >> static_cast<uint8_t>(column / 32);
    return nibbles_in_runs(block + 48, column) | (high & 1) << 4;
  }
  static constexpr auto scales = six_bit_scales<176>;
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf32;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const uint8_t* block = block_of(row, chunk);
    const int first = static_cast<int>(chunk % 2 * 4);  // of the groups
    nibbles_in_runs(block + 48 + chunk % 2 * 64, to);
    for (int half = 0; half < 2; ++half) {
      const __m512i bits = _mm512_broadcast_i32x4(load_128(block + 16 + 16 * half));
      const __m512i one = quarters_shifted<0, 1, 2, 3>(bits, first);
      to[half] = _mm512_or_si512(to[half], _mm512_slli_epi16(_mm512_and_si512(one, mask_of(1)), 4));
    }
  }
  static __m512i words(const uint8_t* block, int64_t column) {
    const __m512i high = words_shifted(load_256(block + 16), column / 32);
    return with_bit<4>(_mm512_slli_epi16(high, 4), words_in_runs(block + 48, column));
  }
#endif
};

struct Q6_K : BlocksOf256<210, 16, false, 32> {
  static Bytes codes(const uint8_t* block, int64_t column) {
    const int64_t half = column / 128, run = column % 128 / 32, at = column % 32;
    const Bytes low = load_bytes(block + half * 64 + run % 2 * 32 + at);
    const Bytes high = load_bytes(block + 128 + half * 32 + at) >> static_cast<uint8_t>(2 * run);
    return (run < 2 ? low & 15 : low >> 4) | (high & 3) << 4;
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      std::array<int8_t, kGroups> integers;
      std::memcpy(&integers, row + 192, sizeof(integers));
      scaled_by(half_at(row + 208), integers, scale);
    }
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf16;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const uint8_t* block = block_of(row, chunk);
    const __m512i low = load_512(block + chunk % 2 * 64);
    const __m512i high =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 128 + chunk % 2 * 32)));
    // The first half of the columns has the bits 0 to 3 of `high`, the second one 4 to 7, each run of 32 two of them.
    const __m512i first = _mm512_and_si512(quarters_shifted<0, 0, 2, 2>(high), mask_of(3));
    const __m512i second = _mm512_and_si512(quarters_shifted<4, 4, 6, 6>(high), mask_of(3));
    halves_of_16(_mm512_or_si512(low_nibbles(low), _mm512_slli_epi16(first, 4)),
                 _mm512_or_si512(high_nibbles(low), _mm512_slli_epi16(second, 4)), to);
  }
  static __m256i bytes(const uint8_t* block, int64_t column) {
    const int64_t half = column / 128, run = column % 128 / 32;
    const __m256i low =
        _mm256_srlv_epi32(load_256(block + half * 64 + run % 2 * 32), _mm256_set1_epi32(static_cast<int>(run / 2 * 4)));
    const __m256i high =
        _mm256_rolv_epi32(load_256(block + 128 + half * 32), _mm256_set1_epi32(static_cast<int>(4 - 2 * run) & 31));
    constexpr int kFirstWhereThird = 0xe4;  // c ? a : b
    const __m256i codes = _mm256_ternarylogic_epi32(low, high, _mm256_set1_epi8(15), kFirstWhereThird);
    return _mm256_sub_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(63)), _mm256_set1_epi8(kMiddle));
  }
#endif
};

// Two bits of four runs of 32 columns in the same bytes.
inline Bytes crumbs(const uint8_t* codes, int64_t column) {
  return load_bytes(codes + column / 128 * 32 + column % 32) >> static_cast<uint8_t>(column % 128 / 32 * 2) & 3;
}
#ifdef MOE_METAL_HAS_AVX512
// Of 128 columns: the first half and the second.
struct Crumbs {
  __m512i low, high;
  explicit Crumbs(const uint8_t* from) {
    const __m512i all = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    low = _mm512_and_si512(quarters_shifted<0, 0, 2, 2>(all), mask_of(3));
    high = _mm512_and_si512(quarters_shifted<4, 4, 6, 6>(all), mask_of(3));
  }
};
// The same of 32 columns, as words.
inline __m512i words_of_crumbs(const uint8_t* codes, int64_t column) {
  return words_shifted(load_256(codes + column / 128 * 32), column % 128 / 32 * 2);
}
#endif

struct Q2_K : BlocksOf256<84, 16, true, 2> {
  static constexpr int kBits = 2;
  static Bytes codes(const uint8_t* block, int64_t column) { return crumbs(block + 16, column); }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups, offset += kGroups) {
      const Bytes both = load_bytes(row);
      scaled_by(half_at(row + 80), std::bit_cast<std::array<int8_t, 16>>(both & 15), scale);
      scaled_by(-half_at(row + 82), std::bit_cast<std::array<int8_t, 16>>(both >> 4), offset);
    }
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf16;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const Crumbs codes(block_of(row, chunk) + 16 + chunk % 2 * 32);
    halves_of_16(codes.low, codes.high, to);
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_of_crumbs(block + 16, column); }
#endif
};

struct Q3_K : BlocksOf256<110, 16, false, 4> {
  static constexpr int kBits = 3;
  static Bytes codes(const uint8_t* block, int64_t column) {
    const Bytes high = load_bytes(block + column % 32) >> static_cast<uint8_t>(column / 32);
    return crumbs(block + 32, column) | (high & 1) << 2;
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // In the words of 4 groups: the lower 4 bits of each, in halves, and then the higher 2 bits.
      const uint32_t first = load_word(row + 96), second = load_word(row + 100), high = load_word(row + 104);
      const auto integers = [&](uint32_t low, int shift) {
        return (low & 0x0f0f0f0f) | (high >> shift & 0x03030303) << 4;
      };
      // Not by way of memory, from which 16 bytes cannot be read right after four words were written.
      using Words = uint32_t __attribute__((vector_size(16)));
      const Words all = {integers(first, 0), integers(second, 2), integers(first >> 4, 4), integers(second >> 4, 6)};
      scaled_by(half_at(row + 108), std::bit_cast<std::array<int8_t, 16>>(std::bit_cast<Bytes>(all) - 32), scale);
    }
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf16;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const uint8_t* block = block_of(row, chunk);
    const int first = static_cast<int>(chunk % 2 * 4);  // of the runs of 32 columns
    const Crumbs codes(block + 32 + chunk % 2 * 32);
    const __m512i bits = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
    const auto with_high = [&](__m512i low, int run) {
      const __m512i one = _mm512_and_si512(quarters_shifted<0, 0, 1, 1>(bits, run), mask_of(1));
      return _mm512_or_si512(low, _mm512_slli_epi16(one, 2));
    };
    halves_of_16(with_high(codes.low, first), with_high(codes.high, first + 2), to);
  }
  static __m512i words(const uint8_t* block, int64_t column) {
    const __m512i high = words_shifted(load_256(block), column / 32);
    return with_bit<2>(_mm512_slli_epi16(high, 2), words_of_crumbs(block + 32, column));
  }
#endif
};

// 4 bits that stand for other numbers, in blocks of 32 columns as ggml_32.h has them.
struct Iq4Xs : BlocksOf256<136, 32, false, 128> {
  static constexpr int kBits = 4;
  static constexpr int number(int code) { return kNonLinear[code]; }
  static Bytes codes(const uint8_t* block, int64_t column) {
    const Bytes both = load_bytes(block + 8 + column / 32 * 16);
    return look_up(kNonLinear, column / 16 % 2 ? both >> 4 : both & 15);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // 4 bits, and then 2, of each group, a byte for each.
      uint64_t low = load_word(row + 4), high = row[2] | row[3] << 8;
      low = (low | low << 16) & 0x0000ffff0000ffff;
      low = (low | low << 8) & 0x00ff00ff00ff00ff;
      low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
      high = (high | high << 24) & 0x000000ff000000ff;
      high = (high | high << 12) & 0x000f000f000f000f;
      high = (high | high << 6) & 0x0303030303030303;
      // Less 32: of 6 bits the highest is flipped, and becomes the sign.
      const uint64_t flipped = (low | high << 4) ^ 0x2020202020202020, sign = flipped & 0x2020202020202020;
      const auto integers = std::bit_cast<std::array<int8_t, 8>>(flipped | sign << 1 | sign << 2);
      scaled_by(half_at(row), integers, scale);
    }
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOf32;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const __m512i both = load_512(block_of(row, chunk) + 8 + chunk % 2 * 64);
    to[0] = look_up(kNonLinear, low_nibbles(both)), to[1] = look_up(kNonLinear, high_nibbles(both));
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_of_nibbles(block + 8 + column / 32 * 16); }
#endif
};

}  // namespace moe_metal
