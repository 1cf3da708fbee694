// GGML's blocks of 256 columns for AVX-512.
#pragma once
#include "cpu/formats/ggml_k.h"
#include "cpu/x86/formats/blocks.h"

namespace moe_metal::x86 {

// Of: the block's portable struct.
template <class Of>
struct BlocksOf256 : Of {
  using Portable = Of;
  static constexpr int number(int code) { return code; }
  static constexpr bool kScalesOfLanes = false;
  static const uint8_t* block_of(const uint8_t* row, int64_t chunk) { return row + chunk / 2 * Of::kBytes; }
};

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

template <class Of>
struct SixBitScales : BlocksOf256<Of> {
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
    for (int64_t b = 0; b < blocks; ++b, row += Of::kBytes, scale += 8, offset += 8) {
      const __m512 both = factors(row);
      // Compressing to memory instead takes a Zen 4 some hundred cycles.
      _mm256_storeu_ps(scale, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, both)));
      const __m512 offsets = _mm512_maskz_compress_ps(0xaaaa, _mm512_xor_ps(both, _mm512_set1_ps(-0.0f)));
      _mm256_storeu_ps(offset, _mm512_castps512_ps256(offsets));
    }
  }
};

struct Q4_K : SixBitScales<moe_metal::Q4_K> {
  static constexpr int kBits = 4;
  static constexpr auto kOrder = kRunsInLanes;
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t) {
    return scales_in_order<kRunsInLanes>(row, chunk);
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
};

struct Q5_K : SixBitScales<moe_metal::Q5_K> {
  static constexpr int kBits = 5;
  static constexpr auto kOrder = kHalvesOfEvenRuns;
  [[gnu::always_inline]] static __m512 scales_of_lanes(const uint8_t* row, int64_t chunk, int64_t) {
    return scales_in_order<kHalvesOfEvenRuns>(row, chunk);
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
};

struct Q6_K : BlocksOf256<moe_metal::Q6_K> {
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
};

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

struct Q2_K : BlocksOf256<moe_metal::Q2_K> {
  static constexpr int kBits = 2;
  static constexpr auto kOrder = kHalvesOf16;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const Crumbs codes(block_of(row, chunk) + 16 + chunk % 2 * 32);
    halves_of_16(codes.low, codes.high, to);
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_of_crumbs(block + 16, column); }
};

struct Q3_K : BlocksOf256<moe_metal::Q3_K> {
  static constexpr int kBits = 3;
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
};

struct Iq4Xs : BlocksOf256<moe_metal::Iq4Xs> {
  static constexpr int kBits = 4;
  static constexpr int number(int code) { return kNonLinear[code]; }
  static constexpr auto kOrder = kHalvesOf32;
  [[gnu::always_inline]] static void unpack(const uint8_t* row, int64_t chunk, int64_t, __m512i (&to)[2]) {
    const __m512i both = load_512(block_of(row, chunk) + 8 + chunk % 2 * 64);
    to[0] = look_up(kNonLinear, low_nibbles(both)), to[1] = look_up(kNonLinear, high_nibbles(both));
  }
  static __m512i words(const uint8_t* block, int64_t column) { return words_of_nibbles(block + 8 + column / 32 * 16); }
};

}  // namespace moe_metal::x86
