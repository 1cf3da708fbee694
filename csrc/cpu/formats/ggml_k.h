// GGML's blocks of 256 columns: a float16 factor of the scales, in some formats one of the offsets, and scales and
// offsets of a few bits for each group.
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
  static constexpr bool kScalesOfLanes = false;
  static const uint8_t* block_of(const uint8_t* row, int64_t chunk) { return row + chunk / 2 * kBytes; }
#endif
};

// to[g] = factor * scale[g] for the groups of a block.
inline void scaled_by(float factor, const std::array<int8_t, 8>& scale, float* to) {
#ifdef MOE_METAL_HAS_AVX2  // compilers do not vectorise the loop below
  const __m256i integers = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(std::bit_cast<int64_t>(scale)));
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(factor)));
#else
  for (int g = 0; g < 8; ++g) to[g] = factor * static_cast<float>(scale[g]);
#endif
}
inline void scaled_by(float factor, const std::array<int8_t, 16>& scale, float* to) {
#ifdef MOE_METAL_HAS_AVX512
  const __m512i integers = _mm512_cvtepi8_epi32(std::bit_cast<__m128i>(scale));
  _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(factor)));
#else
  const auto halves = std::bit_cast<std::array<std::array<int8_t, 8>, 2>>(scale);
  for (int half = 0; half < 2; ++half) scaled_by(factor, halves[half], to + 8 * half);
#endif
}

#ifdef MOE_METAL_HAS_AVX512
// A vector with the same number in each word of a quarter.
template <int a, int b, int c, int d>
inline __m512i in_quarters() {
  const auto of = [](int shift) { return static_cast<int64_t>(shift * 0x0001000100010001LL); };
  return _mm512_setr_epi64(of(a), of(a), of(b), of(b), of(c), of(c), of(d), of(d));
}
// Shifts each quarter by a different number of bits, plus `more`. Bits of neighbouring bytes are shifted in.
template <int a, int b, int c, int d>
inline __m512i quarters_shifted(__m512i bytes, int more = 0) {
  const __m512i shifts = in_quarters<a, b, c, d>();
  return _mm512_srlv_epi16(bytes, _mm512_add_epi16(shifts, _mm512_set1_epi16(static_cast<int16_t>(more))));
}
// Orders of 128 columns in runs of 32, of which two are in the halves of the same bytes: like kHalvesOf32, but with the
// even runs first; and with even runs in the even lanes, odd runs in the odd lanes.
inline constexpr auto kHalvesOfEvenRuns = [] {
  std::array<uint8_t, 128> columns{};
  for (int i = 0; i < 128; ++i) {
    const int quarter = i % 64 / 16, run = quarter % 2 * 2 + quarter / 2;
    columns[i] = static_cast<uint8_t>(run * 32 + i / 64 * 16 + i % 16);
  }
  return columns;
}();
inline constexpr auto kRunsInLanes = [] {
  std::array<uint8_t, 128> columns{};
  for (int i = 0; i < 128; ++i) {
    const int lane = i % 64 / 4, of_run = (lane ^ i / 64) % 8;
    columns[i] = static_cast<uint8_t>(lane / 8 * 64 + lane % 2 * 32 + of_run * 4 + i % 4);
  }
  return columns;
}();
// The 4-bit codes of 128 columns in the order kHalvesOfEvenRuns.
inline void nibbles_in_runs(const uint8_t* from, __m512i (&to)[2]) {
  const __m512i all = load_512(from);
  const __m512i low = low_nibbles(all), high = high_nibbles(all);
  to[0] = _mm512_shuffle_i64x2(low, high, 0x88), to[1] = _mm512_shuffle_i64x2(low, high, 0xdd);
}
// The same for 32 columns, as words.
inline __m512i words_in_runs(const uint8_t* codes, int64_t column) {
  return words_shifted(load_256(codes + column / 64 * 32), column / 32 % 2 * 4);
}
#endif

// 4-bit codes: the low halves of 32 bytes are a run of 32 columns, the high halves the next run.
template <class Some>
inline Some nibbles_in_runs(const uint8_t* codes, int64_t column) {
  return shifted(load_bytes<Some>(codes + column / 64 * 32 + column % 32), column / 32 % 2 * 4, 15);
}

// Blocks that begin with two float16 factors, and 12 bytes with a 6-bit scale and a 6-bit offset for each of 8 groups.
template <int bytes, int middle>
struct SixBitScales : BlocksOf256<bytes, 32, true, middle> {
#ifdef MOE_METAL_HAS_AVX512
  static constexpr bool kScalesOfLanes = true;
  // The scales of 128 columns in an order.
  template <const std::array<uint8_t, 128>& order>
  [[gnu::always_inline]] static __m512 scales_in_order(const uint8_t* row, int64_t chunk) {
    alignas(64) static constexpr auto kLanes = [] {
      std::array<int32_t, 16> lanes{};
      for (int i = 0; i < 16; ++i) lanes[i] = order[4 * i] / 32 * 2;  // of factors()
      return lanes;
    }();
    const __m512i first = _mm512_set1_epi32(static_cast<int>(chunk % 2 * 8));
    const __m512i lanes = _mm512_add_epi32(_mm512_load_si512(kLanes.data()), first);
    return _mm512_permutexvar_ps(lanes, factors(SixBitScales::block_of(row, chunk)));
  }
  // The groups' scales in the even lanes, and what is subtracted in the odd lanes.
  [[gnu::always_inline]] static __m512 factors(const uint8_t* block) {
    // A lane gets the byte with its lower bits and, in the last four groups, the byte whose highest 2 bits are its own.
    alignas(64) static constexpr auto kBytes = [] {
      std::array<std::array<uint8_t, 4>, 16> all{};
      for (int i = 0; i < 16; ++i) {
        const auto group = static_cast<uint8_t>(i / 2), odd = static_cast<uint8_t>(i % 2 * 4);
        constexpr uint8_t kNone = 0x80;
        all[i][0] = group < 4 ? 4 + odd + group : 8 + group;
        all[i][1] = group < 4 ? kNone : odd + group;
        all[i][2] = all[i][3] = kNone;
      }
      return all;
    }();
    const __m512i both = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_128(block)), _mm512_load_si512(&kBytes));
    const auto in_halves = [](int64_t first, int64_t second) {
      return _mm512_mask_set1_epi64(_mm512_set1_epi64(first), 0xf0, second);
    };
    const __m512i low =
        _mm512_and_si512(_mm512_srlv_epi32(both, in_halves(0, 4LL << 32)), in_halves(0x3f0000003f, 0x0f0000000f));
    const __m512i all = or_masked(low, _mm512_srli_epi32(both, 10), _mm512_set1_epi32(0x30));
    const __m512 two = _mm512_cvtph_ps(_mm256_set1_epi32(static_cast<int>(load_word(block))));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(all), two);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    for (int64_t b = 0; b < blocks; ++b, row += bytes, scale += 8, offset += 8) {
      const __m512 both = factors(row);
      // Compressing to memory instead takes a Zen 4 some hundred cycles.
      _mm256_storeu_ps(scale, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, both)));
      const __m512 offsets = _mm512_maskz_compress_ps(0xaaaa, _mm512_xor_ps(both, _mm512_set1_ps(-0.0f)));
      _mm256_storeu_ps(offset, _mm512_castps512_ps256(offsets));
    }
  }
#else
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    for (int64_t b = 0; b < blocks; ++b, row += bytes, scale += 8, offset += 8) {
      // Each word has four groups: the lower 6 bits are for the first four, the upper 2 bits for the last four.
      const uint32_t first = load_word(row + 4), second = load_word(row + 8), low = load_word(row + 12);
      const auto integers = [](uint32_t of_first, uint32_t of_others) {
        const uint32_t others = of_others | (of_first >> 6 & 0x03030303) << 4;
        return std::bit_cast<std::array<int8_t, 8>>((of_first & 0x3f3f3f3f) | uint64_t{others} << 32);
      };
      scaled_by(half_at(row), integers(first, low & 0x0f0f0f0f), scale);
      scaled_by(-half_at(row + 2), integers(second, low >> 4 & 0x0f0f0f0f), offset);
    }
  }
#endif
};

struct Q4_K : SixBitScales<144, 8> {
  static constexpr int kBits = 4;
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    return nibbles_in_runs<Some>(block + 16, column);
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kRunsInLanes;
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t) {
    return Q4_K::template scales_in_order<kRunsInLanes>(row, chunk);
  }
  [[gnu::always_inline]] static void unpack_in_place(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const __m512i all = load_512(block_of(row, chunk) + 16 + chunk % 2 * 64);
    const __m512i halves = _mm512_set1_epi64(static_cast<int64_t>(0xf0f0f0f00f0f0f0f));
    to[0] = _mm512_and_si512(all, halves);
    to[1] = _mm512_and_si512(_mm512_shuffle_epi32(all, _MM_PERM_CDAB), halves);
  }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t columns, __m512i (&to)[2]) {
    unpack_in_place(row, chunk, columns, to);
    for (__m512i& some : to) some = _mm512_srlv_epi32(some, _mm512_set1_epi64(4LL << 32));
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_in_runs(block + 16, column); }
#endif
};

struct Q5_K : SixBitScales<176, 16> {
  static constexpr int kBits = 5;
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    const Some high = shifted(load_bytes<Some>(block + 16 + column % 32), column / 32, 1);
    return nibbles_in_runs<Some>(block + 48, column) | shifted_left<4>(high);
  }
#ifdef MOE_METAL_HAS_AVX512
  static constexpr auto kOrder = kHalvesOfEvenRuns;
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t) {
    return Q5_K::template scales_in_order<kHalvesOfEvenRuns>(row, chunk);
  }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const uint8_t* block = block_of(row, chunk);
    const int first = static_cast<int>(chunk % 2 * 4);  // of the groups
    nibbles_in_runs(block + 48 + chunk % 2 * 64, to);
    // The bit of each run, moved to the place of the fifth bit of a code.
    const __m512i turns = _mm512_sub_epi64(_mm512_setr_epi64(4, 4, 2, 2, 3, 3, 1, 1), _mm512_set1_epi64(first));
    for (int half = 0; half < 2; ++half) {
      const __m512i bits = _mm512_rolv_epi64(_mm512_broadcast_i32x4(load_128(block + 16 + 16 * half)), turns);
      to[half] = or_masked(to[half], bits, mask_of(16));
    }
  }
  static __m512i words(const uint8_t* block, int64_t column) {
    const __m512i high = words_shifted(load_256(block + 16), column / 32);
    return with_bit<4>(_mm512_slli_epi16(high, 4), words_in_runs(block + 48, column));
  }
#endif
};

struct Q6_K : BlocksOf256<210, 16, false, 32> {
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    const int64_t half = column / 128, run = column % 128 / 32, at = column % 32;
    const Some low = shifted(load_bytes<Some>(block + half * 64 + run % 2 * 32 + at), run / 2 * 4, 15);
    const Some high = shifted(load_bytes<Some>(block + 128 + half * 32 + at), 2 * run, 3);
    return low | shifted_left<4>(high);
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
  static constexpr bool kScalesOfLanes = true;
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t) {
    const uint8_t* block = block_of(row, chunk);
    const __m512i groups = _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    const __m512 all = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(block + 192))),
                                     _mm512_set1_ps(half_at(block + 208)));
    return _mm512_permutexvar_ps(_mm512_add_epi32(groups, _mm512_set1_epi32(static_cast<int>(chunk % 2 * 8))), all);
  }
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const uint8_t* block = block_of(row, chunk);
    const __m512i low = load_512(block + chunk % 2 * 64);
    const __m512i high =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 128 + chunk % 2 * 32)));
    // Each run of 32 columns has two bits of `high`, which are moved to the place of a code's highest two bits.
    const __m512i first = _mm512_sllv_epi16(high, in_quarters<4, 4, 2, 2>());
    const __m512i second = _mm512_srlv_epi16(high, in_quarters<0, 0, 2, 2>());
    halves_of_16(or_masked(low_nibbles(low), first, mask_of(0x30)), or_masked(high_nibbles(low), second, mask_of(0x30)),
                 to);
  }
  static __m512i bytes(const uint8_t* block, int64_t column) {
    // Two runs of 32 columns: by how much their bits are shifted or rotated, to be loaded from memory.
    alignas(64) static constexpr int32_t kLow[2] = {0, 4};
    alignas(64) static constexpr int32_t kHigh[2][16] = {{4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2},
                                                         {0, 0, 0, 0, 0, 0, 0, 0, 30, 30, 30, 30, 30, 30, 30, 30}};
    const int64_t half = column / 128, second = column % 128 / 64;
    const __m512i low = _mm512_srlv_epi32(_mm512_loadu_si512(block + half * 64), _mm512_set1_epi32(kLow[second]));
    const __m512i high =
        _mm512_rolv_epi32(_mm512_broadcast_i64x4(load_256(block + 128 + half * 32)), _mm512_load_si512(kHigh[second]));
    constexpr int kFirstWhereThird = 0xe4;  // c ? a : b
    const __m512i codes = _mm512_ternarylogic_epi32(low, high, mask_of(15), kFirstWhereThird);
    return _mm512_sub_epi8(_mm512_and_si512(codes, mask_of(63)), mask_of(kMiddle));
  }
#endif
};

// 2-bit codes of four runs of 32 columns in the same bytes.
template <class Some>
inline Some crumbs(const uint8_t* codes, int64_t column) {
  return shifted(load_bytes<Some>(codes + column / 128 * 32 + column % 32), column % 128 / 32 * 2, 3);
}
#ifdef MOE_METAL_HAS_AVX512
// The 2-bit codes of 128 columns: the first half and the second half.
struct Crumbs {
  __m512i low, high;
  explicit Crumbs(const uint8_t* from) {
    const __m512i all = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    low = _mm512_and_si512(quarters_shifted<0, 0, 2, 2>(all), mask_of(3));
    high = _mm512_and_si512(quarters_shifted<4, 4, 6, 6>(all), mask_of(3));
  }
};
// The same for 32 columns, as words.
inline __m512i words_of_crumbs(const uint8_t* codes, int64_t column) {
  return words_shifted(load_256(codes + column / 128 * 32), column % 128 / 32 * 2);
}
#endif

struct Q2_K : BlocksOf256<84, 16, true, 2> {
  static constexpr int kBits = 2;
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    return crumbs<Some>(block + 16, column);
  }
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
  template <class Some = Bytes>
  static Some codes(const uint8_t* block, int64_t column) {
    const Some high = shifted(load_bytes<Some>(block + column % 32), column / 32, 1);
    return crumbs<Some>(block + 32, column) | shifted_left<2>(high);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // Words of 4 groups: the lower 4 bits of scales in halves of bytes, then the upper 2 bits.
      using Words = uint32_t __attribute__((vector_size(16)));
      const uint32_t first = load_word(row + 96), second = load_word(row + 100), high = load_word(row + 104);
      const Words low = Words{first, second, first, second} >> Words{0, 0, 4, 4} & 0x0f0f0f0f;
      const Words all = low | (Words{high, high, high, high} >> Words{0, 2, 4, 6} & 0x03030303) << 4;
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

// 4-bit indices into a table, in runs of 32 columns with the layout of ggml_32.h.
struct Iq4Xs : BlocksOf256<136, 32, false, 128> {
  static constexpr int kBits = 4;
  static constexpr int number(int code) { return kNonLinear[code]; }
  static Bytes codes(const uint8_t* block, int64_t column) {
    const Bytes both = load_bytes(block + 8 + column / 32 * 16);
    return look_up(kNonLinear, shifted(both, column / 16 % 2 * 4, 15));
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // The lower 4 bits and the upper 2 bits of each group's scale, expanded to bytes.
      uint64_t low = load_word(row + 4), high = row[2] | row[3] << 8;
      low = (low | low << 16) & 0x0000ffff0000ffff;
      low = (low | low << 8) & 0x00ff00ff00ff00ff;
      low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
      high = (high | high << 24) & 0x000000ff000000ff;
      high = (high | high << 12) & 0x000f000f000f000f;
      high = (high | high << 6) & 0x0303030303030303;
      // Subtracts 32: the highest of 6 bits is flipped and becomes the sign.
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
