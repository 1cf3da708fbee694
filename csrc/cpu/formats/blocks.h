// Shared by the readers of GGML's blocks. A block is a struct with these members:
//
//   kColumns, kBytes    the size of a block
//   kGroup              neighbouring columns that share a scale
//   kMiddle             the middle of the codes: a value is scale * (code - kMiddle)
//   kOffset             whether the format has offsets instead: a value is scale * code + offset
//   codes()             16 codes of a block, from a column on, as unsigned bytes. With runs of 32 columns it is a
//                       template, which can also give 32
//   scales()            the scale of each group of several blocks, and the offset if kOffset
//
// and for AVX-512:
//
//   unpack()            the codes of 128 columns, in the order kOrder
//   unpack_in_place()   some formats: the same, but the codes of odd lanes are times 16, which saves shifts
//   kScalesOfLanes      whether scales_of_lanes() can read the scales of these columns; a lane has four columns
//   factors()           formats with kScalesOfLanes and kOffset: the scales of a block's groups in the even lanes, and
//                       the numbers to subtract in the odd lanes
//   words()             formats with up to 5 bits: the codes of 32 columns as words. Bits above the lowest kBits are
//                       undefined. number() is the value of a code
//   bytes()             other formats: the codes of 32 columns, minus the middle
//   scale_of_block()    blocks of 32 columns: the scale, and the offset if kOffset
#pragma once
#include <array>
#include <bit>
#include <cstring>

#include "cpu/formats/codes.h"
#include "cpu/weights/processor_dots.h"

namespace moe_metal {

// 16 or 32 columns of a row. Compilers vectorise operations on them on every processor.
using Bytes = uint8_t __attribute__((vector_size(16)));
using Bytes32 = uint8_t __attribute__((vector_size(32)));

template <class Some = Bytes>
inline Some load_bytes(const uint8_t* from) {
  Some bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// bytes >> shift & mask. Compilers need five instructions for a shift that is only known at run time.
template <class Some>
inline Some shifted(Some bytes, int64_t shift, uint8_t mask) {
#ifdef MOE_METAL_HAS_AVX2
  const __m128i count = _mm_cvtsi64_si128(shift);
  if constexpr (sizeof(Some) == 32)
    return std::bit_cast<Some>(_mm256_srl_epi16(std::bit_cast<__m256i>(bytes), count)) & mask;
  else
    return std::bit_cast<Some>(_mm_srl_epi16(std::bit_cast<__m128i>(bytes), count)) & mask;
#else
  return bytes >> static_cast<uint8_t>(shift) & mask;
#endif
}

// bytes << count, for bytes whose highest `count` bits are 0. Compilers double the bytes `count` times.
template <int count, class Some>
inline Some shifted_left(Some bytes) {
#ifdef MOE_METAL_HAS_AVX2
  if constexpr (sizeof(Some) == 32)
    return std::bit_cast<Some>(_mm256_slli_epi16(std::bit_cast<__m256i>(bytes), count));
  else
    return std::bit_cast<Some>(_mm_slli_epi16(std::bit_cast<__m128i>(bytes), count));
#else
  return bytes << count;
#endif
}

// values[code] for codes below 16.
inline Bytes look_up(const std::array<uint8_t, 16>& values, Bytes codes) {
#if defined(MOE_METAL_HAS_AVX2)
  const auto table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values.data()));
  return std::bit_cast<Bytes>(_mm_shuffle_epi8(table, std::bit_cast<__m128i>(codes)));
#elif defined(MOE_METAL_HAS_NEON)
  return std::bit_cast<Bytes>(vqtbl1q_u8(vld1q_u8(values.data()), std::bit_cast<uint8x16_t>(codes)));
#else
  for (int i = 0; i < 16; ++i) codes[i] = values[codes[i]];
  return codes;
#endif
}

// Expands 16 bits to bytes: 0 or `value`.
inline Bytes bits_as_bytes(const uint8_t* from, uint8_t value) {
  constexpr Bytes kBit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  Bytes both;
#ifdef MOE_METAL_HAS_AVX2  // compilers insert the bytes one by one
  uint16_t word;
  std::memcpy(&word, from, sizeof(word));
  const __m128i places = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  both = std::bit_cast<Bytes>(_mm_shuffle_epi8(_mm_cvtsi32_si128(word), places));
#else
  for (int i = 0; i < 16; ++i) both[i] = from[i / 8];
#endif
  return reinterpret_cast<Bytes>((both & kBit) != 0) & value;
}

inline float half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return static_cast<float>(at::Half(bits, at::Half::from_bits()));
}

// Converts float16 numbers that are `step` bytes apart. They are gathered first, since a vector is converted in the
// time of one number.
inline void halves(const uint8_t* from, int64_t step, int64_t count, float* to) {
  constexpr int64_t kSome = 64;
  alignas(64) at::Half some[kSome];
  for (; count > 0; count -= kSome, to += kSome) {
    const int64_t now = std::min(count, kSome);
    for (int64_t i = 0; i < now; ++i, from += step) std::memcpy(&some[i], from, sizeof(at::Half));
    for_each_vector(now, [&](int64_t i, auto n) { store(to + i, load(some + i, n), n); });
  }
}

#ifdef MOE_METAL_HAS_AVX512
// Calls use(i, bytes) for each 16 bytes of a vector.
template <class Use>
[[gnu::always_inline]] inline void each_sixteen(__m256i all, Use&& use) {
  use(0, _mm256_castsi256_si128(all)), use(1, _mm256_extracti128_si256(all, 1));
}
template <class Use>
[[gnu::always_inline]] inline void each_sixteen(__m512i all, Use&& use) {
  use(0, _mm512_castsi512_si128(all)), use(1, _mm512_extracti32x4_epi32(all, 1));
  use(2, _mm512_extracti32x4_epi32(all, 2)), use(3, _mm512_extracti32x4_epi32(all, 3));
}
#endif

#ifndef MOE_METAL_HAS_NEON
// Codes minus the middle, as floats, from `lane` on.
[[gnu::always_inline]] inline Vec to_floats(Bytes codes, uint8_t middle, int lane) {
  const Bytes centred = codes - middle;
#ifdef MOE_METAL_HAS_AVX512
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(std::bit_cast<__m128i>(centred)));
#elif defined(MOE_METAL_HAS_AVX2)
  const auto all = std::bit_cast<__m128i>(centred);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lane ? _mm_srli_si128(all, 8) : all));
#else
  int8_t numbers[16];
  float lanes[kLanes];
  std::memcpy(numbers, &centred, sizeof(numbers));
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = numbers[lane + i];
  return Vec::loadu(lanes);
#endif
}
#endif

// The reader of a block's format; weights/packed_rows.h describes readers.
template <class Block>
struct Blocks {
  static constexpr bool kOffset = Block::kOffset, kScalesAreRare = false, kOwnScales = true;
  static constexpr int kColumns = Block::kColumns, kBytes = Block::kBytes, kGroup = Block::kGroup;
  // load_permuted() centres the codes of formats without offsets, except with AVX2, where plain codes take less time.
  static constexpr float kUnit = 1, kMiddle = kOffset || kLanes == 8 ? Block::kMiddle : 0;
  static constexpr int kAtOnce = 32 / kLanes;
  using Dots = FewDots<Block>;
  using Tiles = NoDots;
  using Panels = IntegerPanels<Block>;
#ifdef MOE_METAL_HAS_NEON
  [[gnu::always_inline]] void floats(const uint8_t* row, int64_t column, Sixteen& to) const {
    const Bytes codes = Block::codes(row + column / kColumns * kBytes, column % kColumns);
    to_floats<!kOffset>(std::bit_cast<uint8x16_t>(codes - static_cast<uint8_t>(kOffset ? 0 : Block::kMiddle)), to);
  }
#else
  struct Permutation {
    static void permute_like_load([[maybe_unused]] Vec (&x)[kAtOnce]) {
      if constexpr (kLanes == 8) {  // each fourth number
        const auto [first, second] = at::vec::deinterleave2(x[0], x[1]);
        const auto [third, fourth] = at::vec::deinterleave2(x[2], x[3]);
        std::tie(x[0], x[2]) = at::vec::deinterleave2(first, third);
        std::tie(x[1], x[3]) = at::vec::deinterleave2(second, fourth);
      }
    }
  } codes;

  template <class Count>
  [[gnu::always_inline]] Vec operator()(const uint8_t* row, int64_t column, Count) const {
    const int64_t at = column % kColumns;
    const Bytes codes = Block::codes(row + column / kColumns * kBytes, at / 16 * 16);
    return to_floats(codes, kOffset ? 0 : Block::kMiddle, at % 16);
  }
  [[gnu::always_inline]] void load_permuted(const uint8_t* row, int64_t column, Vec (&to)[kAtOnce]) const {
#if defined(MOE_METAL_HAS_AVX2) && !defined(MOE_METAL_HAS_AVX512)
    if (column % 32 != 0) __builtin_unreachable();  // for simpler addresses
    // Shifts take less time than the shuffles that widen neighbouring bytes.
    const __m256i all = codes_of_32(row + column / kColumns * kBytes, column % kColumns);
    const __m256i lowest = _mm256_set1_epi32(255);
    to[0] = _mm256_cvtepi32_ps(_mm256_and_si256(all, lowest));
    to[1] = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(all, 8), lowest));
    to[2] = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(all, 16), lowest));
    to[3] = _mm256_cvtepi32_ps(_mm256_srli_epi32(all, 24));
#else
    unrolled<kAtOnce>([&](auto v) { to[v] = (*this)(row, column + v * kLanes, Whole()); });
#endif
  }
#endif
#if defined(MOE_METAL_HAS_AVX2) && !defined(MOE_METAL_HAS_AVX512)
  // Codes are transposed as bytes.
  static int64_t transposed_columns() { return 32; }
  template <class Use>
  static void transposed(const uint8_t* rows, int64_t step, int64_t column, Use&& use) {
    if (column % 32 != 0) __builtin_unreachable();  // for simpler addresses
    const uint8_t* blocks = rows + column / kColumns * kBytes;
    Vec codes[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) {
      codes[r] = _mm256_castsi256_ps(codes_of_32(blocks + r * step, column % kColumns));
    }
    transpose(codes);
    MOE_METAL_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      const __m256i four = _mm256_castps_si256(codes[i]), lowest = _mm256_set1_epi32(255);
      MOE_METAL_UNROLL for (int j = 0; j < 4; ++j) {
        use(4 * i + j, _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(four, 8 * j), lowest)));
      }
    }
  }
#endif
#ifdef MOE_METAL_HAS_AVX512
  [[gnu::always_inline]] static __m512i words(const uint8_t* row, int64_t column)
    requires requires(const uint8_t* block, int64_t at) { Block::words(block, at); }
  {
    return Block::words(row + column / kColumns * kBytes, column % kColumns);
  }
  // N vectors of centred codes. A block's bytes() has those of two vectors, or of four.
  template <int N>
  [[gnu::always_inline]] static void vectors(const uint8_t* row, int64_t column, Vec (&to)[N])
    requires requires(const uint8_t* block, int64_t at) { requires N * 16 % sizeof(Block::bytes(block, at)) == 0; }
  {
    constexpr int kAtOnce = sizeof(Block::bytes(row, column)) / 16;
    MOE_METAL_UNROLL for (int i = 0; i < N; i += kAtOnce, column += kAtOnce * 16) {
      const auto all = Block::bytes(row + column / kColumns * kBytes, column % kColumns);
      each_sixteen(all, [&](int k, __m128i some) __attribute__((always_inline)) {
        to[i + k] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some));
      });
    }
  }
  [[gnu::always_inline]] static void scale_of_block(const uint8_t* block, float& scale, float& offset)
    requires requires { Block::scale_of_block(block, scale, offset); }
  {
    Block::scale_of_block(block, scale, offset);
  }
  static Vec values(int half) {
    static constexpr auto kValues = [] {
      std::array<float, 32> values{};
      for (int i = 0; i < 32; ++i) {
        values[i] = static_cast<float>(Block::number(i % (1 << Block::kBits)) - (kOffset ? 0 : Block::kMiddle));
      }
      return values;
    }();
    return Vec::loadu(kValues.data() + 16 * half);
  }
#endif

  static void scales(const uint8_t* row, int64_t columns, float* scale, float* offset) {
    Block::scales(row, columns / kColumns, scale, offset);
  }

 private:
#if defined(MOE_METAL_HAS_AVX2) && !defined(MOE_METAL_HAS_AVX512)
  [[gnu::always_inline]] static __m256i codes_of_32(const uint8_t* block, int64_t column) {
    if constexpr (requires { Block::template codes<Bytes32>(block, column); }) {
      return std::bit_cast<__m256i>(Block::template codes<Bytes32>(block, column));
    } else {
      const Bytes low = Block::codes(block, column), high = Block::codes(block, column + 16);
      return _mm256_set_m128i(std::bit_cast<__m128i>(high), std::bit_cast<__m128i>(low));
    }
  }
#endif
};

#ifdef MOE_METAL_HAS_AVX512
// An order of 128 columns: the first halves of all runs of 32, then the second halves. A lane sums 8 columns, which
// share a scale.
inline constexpr auto kHalvesOf32 = [] {
  std::array<uint8_t, 128> columns{};
  for (int i = 0; i < 128; ++i) columns[i] = static_cast<uint8_t>(i % 64 / 16 * 32 + i / 64 * 16 + i % 16);
  return columns;
}();

// Loads once: compilers repeat an unaligned load for each of its uses, and most of these touch two cache lines.
inline __m512i load_512(const uint8_t* from) {
  __m512i all = _mm512_loadu_si512(from);
  asm("" : "+v"(all));
  return all;
}
inline __m256i load_256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline __m128i load_128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
// Loads 16 bytes from each of four addresses.
inline __m512i four_times_16(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(a)), load_128(b), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(c)), load_128(d), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// Loads 32 bytes from each of two addresses.
inline __m512i two_times_32(const uint8_t* a, const uint8_t* b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_256(a)), load_256(b), 1);
}
inline __m512i mask_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, mask_of(15)); }
inline __m512i high_nibbles(__m512i bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
// a | (b & mask)
inline __m512i or_masked(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }
// Widens 32 bytes to words and shifts them right.
inline __m512i words_shifted(__m256i bytes, int64_t shift) {
  return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(static_cast<int16_t>(shift)));
}
// The low halves of 16 bytes, then the high halves, as words.
inline __m512i words_of_nibbles(const uint8_t* from) {
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load_128(from))), shifts);
}
inline __m512i look_up(const std::array<uint8_t, 16>& values, __m512i codes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_128(values.data())), codes);
}
#endif

}  // namespace moe_metal
