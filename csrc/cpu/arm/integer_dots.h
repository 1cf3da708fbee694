// Products of weights of up to 8 bits with few tokens, on processors with sdot: every Mac with Apple silicon has it.
//
// Both are integers. An instruction multiplies 16 weights by 16 digits of a token and adds up groups of four, exactly.
// Only the sum of a group is rounded, so bfloat16 tokens lose no precision. Other processors have no such products.
#pragma once
#include "cpu/weights/scaled_rows.h"

#ifndef MOE_METAL_HAS_DOTPROD
namespace moe_metal::arm {
template <int bits, bool is_e2m1>
struct Integers;
template <class Numbers>
using IntegerDots = NoDots;
}  // namespace moe_metal::arm
#else
#include "cpu/arm/digits.h"
#include "cpu/plan.h"

namespace moe_metal::arm {

// Consecutive numbers without blocks: integer codes, or e2m1 times 2.
template <int bits, bool kE2m1s>
struct Integers {
  static constexpr bool kOffset = !kE2m1s;
  static constexpr int kMiddle = kE2m1s ? 0 : 1 << (bits - 1);
  static constexpr float kUnit = kE2m1s ? 0.5f : 1;
  static constexpr int kColumns = 8, kBytes = bits;
  [[gnu::always_inline]] static int8x16_t from_middle(const uint8_t* row, int64_t column) {
    const uint8x16_t codes = spread<bits>(row + column * bits / 8);
    if constexpr (!kE2m1s) return vreinterpretq_s8_u8(vsubq_u8(codes, vdupq_n_u8(kMiddle)));
    constexpr int8x16_t kTwice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return vqtbl1q_s8(kTwice, codes);
  }
};

template <class Numbers>
class IntegerDots {
 public:
  static bool takes(const ScaledRows& rows, int64_t tokens) { return tokens <= kFewTokens && rows.columns > 0; }
  // The result of a token without digits is NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const int64_t bytes = at::divup(2 * chunks * sizeof(Chunk) + rows.groups * sizeof(float), kLine) * kLine;
    const auto forms = forms_.look_up_each<kFewTokens>(
        tokens, bytes, [&](const float* x, char* form) { return lay_out(x, rows, form); });
    int64_t n = 0;
    for (; n + 4 <= tokens.count; n += 4) all_rows<4>(rows, &forms[n], tokens.out + n);
    for (; n + 2 <= tokens.count; n += 2) all_rows<2>(rows, &forms[n], tokens.out + n);
    if (n < tokens.count) all_rows<1>(rows, &forms[n], tokens.out + n);
  }

 private:
  static constexpr int64_t kColumns = Digits::kColumns;  // of a chunk
  static constexpr int kDigits = Digits::kCount;

  struct alignas(64) Chunk {
    int8_t digits[kColumns / kSixteen][kDigits][kSixteen];
    float unit;     // in the first chunk: NaN if the token has no digits
    int32_t index;  // the index of its chunk in the row
    int32_t rests;  // in the first chunk: how many chunks of rests follow
  };

  // Writes the chunks, then chunks of rests, for which there is as much room, then the sums of groups.
  // -> the number of bytes used
  static int64_t lay_out(const float* x, const ScaledRows& rows, char* form) {
    auto* chunks = reinterpret_cast<Chunk*>(form);
    const int64_t count = at::divup(rows.columns, kColumns);
    Chunk *rest = chunks + count, *end = rest + count;
    bool finite = true;
    for (int64_t c = 0; c < count; ++c) {
      Digits all;
      finite &= all.set(x + c * kColumns, std::min(kColumns, rows.columns - c * kColumns));
      lay_out(all, c, chunks[c]);
      while (!all.whole && finite) {
        finite = rest < end && all.set(all.rest, kColumns);
        if (finite) lay_out(all, c, *rest++);
      }
    }
    chunks->rests = static_cast<int32_t>(rest - chunks - count);
    if (!finite) chunks->unit = NAN;
    auto* sums = reinterpret_cast<float*>(end);
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; Numbers::kOffset && g < rows.groups; ++g) sums[g] = sum_of(x + g * group, group);
    return (rest - chunks) * sizeof(Chunk) + rows.groups * sizeof(float);
  }
  static void lay_out(const Digits& all, int64_t index, Chunk& chunk) {
    std::memcpy(chunk.digits, all.digits, sizeof(chunk.digits));
    chunk.unit = all.unit * Numbers::kUnit;
    chunk.index = static_cast<int32_t>(index);
  }

  template <int N>
  void all_rows(const ScaledRows& rows, const char* const* forms, float* const* out) const {
    rows.for_blocks<4 / N>(
        [&](auto R, int64_t first, const uint8_t* ahead) { multiply_block<R, N>(rows, first, ahead, forms, out); });
  }

  // Pointers to the numbers and the scales of R rows from `first` on.
  template <int R>
  struct Rows {
    const uint8_t* data[R];
    const float* scales[R];
    int64_t columns;
    int shift;
    Rows(const ScaledRows& rows, int64_t first) : columns(rows.columns), shift(rows.shift) {
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        data[r] = rows.data + (first + r) * rows.row;
        scales[r] = rows.scales + (first + r) * rows.groups;
      }
    }
  };

  template <int R, int N>
  void multiply_block(const ScaledRows& rows, int64_t first, const uint8_t* ahead, const char* const* forms,
                      float* const* out) const {
    constexpr int64_t kBytes = R * kColumns * Numbers::kBytes / Numbers::kColumns;
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const Rows<R> block(rows, first);
    const Chunk* x[N];
    float32x4_t sums[R][N];
    int64_t rests = 0;
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      x[n] = reinterpret_cast<const Chunk*>(forms[n]);
      rests += x[n]->rests;
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) sums[r][n] = vdupq_n_f32(0);
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const Chunk* here[N];
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) here[n] = x[n] + c;
      for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(ahead + c * kBytes + line);
      add<R, N>(block, c, here, sums);
    }
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) out[n][first + r] = sum(Vec(sums[r][n]));
      if (rests > 0) add_rests<R>(block, x[n], chunks, out[n] + first);
    }
    if constexpr (Numbers::kOffset) add_offsets<R, N>(rows, first, x, out);
  }

  // Rare: few tokens have rests.
  template <int R>
  [[gnu::noinline]] static void add_rests(const Rows<R>& rows, const Chunk* x, int64_t chunks, float* out) {
    float32x4_t sums[R][1];
    for (int r = 0; r < R; ++r) sums[r][0] = vdupq_n_f32(0);
    for (int64_t i = 0; i < x->rests; ++i) {
      const Chunk* const rest[1] = {x + chunks + i};
      add<R, 1>(rows, rest[0]->index, rest, sums);
    }
    for (int r = 0; r < R; ++r) out[r] += sum(Vec(sums[r][0]));
  }

  // The products of a chunk. A whole chunk of blocks is unrolled, so that all offsets are compile-time constants.
  template <int R, int N>
  [[gnu::always_inline]] static void add(const Rows<R>& rows, int64_t c, const Chunk* const (&x)[N],
                                         float32x4_t (&sums)[R][N]) {
    const int64_t begin = c * kColumns, columns = std::min(kColumns, rows.columns - begin);
    if constexpr (requires { Numbers::kGroup; }) {
      constexpr int64_t kGroup = Numbers::kGroup;
      if (columns == kColumns) {
        MOE_METAL_UNROLL for (int64_t at = 0; at < kColumns; at += kGroup) add_group(rows, begin, at, kGroup, x, sums);
      } else {
        for (int64_t at = 0; at < columns; at += kGroup) add_group(rows, begin, at, kGroup, x, sums);
      }
    } else {
      const int64_t group = std::min(int64_t{1} << rows.shift, kColumns);
      for (int64_t at = 0; at < columns; at += group) add_group(rows, begin, at, group, x, sums);
    }
  }

  // The products of columns that share a scale.
  template <int R, int N>
  [[gnu::always_inline]] static void add_group(const Rows<R>& rows, int64_t begin, int64_t at, int64_t group,
                                               const Chunk* const (&x)[N], float32x4_t (&sums)[R][N]) {
    int32x4_t of_digits[R][N][kDigits] = {};
    MOE_METAL_UNROLL for (int64_t i = 0; i < group; i += kSixteen) {
      int8x16_t digits[N][kDigits];
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        const auto& all = x[n]->digits[(at + i) / kSixteen];
        MOE_METAL_UNROLL for (int d = 0; d < kDigits; ++d) digits[n][d] = vld1q_s8(all[d]);
      }
      MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
        const int8x16_t numbers = from_middle(rows.data[r], begin, at + i);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          MOE_METAL_UNROLL for (int d = 0; d < kDigits; ++d) {
            of_digits[r][n][d] = vdotq_s32(of_digits[r][n][d], numbers, digits[n][d]);
          }
        }
      }
    }
    const int64_t of_row = (begin + at) >> rows.shift;
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      const float scale = rows.scales[r][of_row];
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        const auto& all = of_digits[r][n];
        const float32x4_t high = vcvtq_f32_s32(vmlaq_n_s32(all[1], all[0], 256)), low = vcvtq_f32_s32(all[2]);
        const float32x4_t part = vmulq_n_f32(vfmaq_n_f32(low, high, 256), x[n]->unit);
        sums[r][n] = vfmaq_n_f32(sums[r][n], part, scale);
      }
    }
  }

  // 16 numbers from column begin + at on; `begin` is the first column of a chunk.
  [[gnu::always_inline]] static int8x16_t from_middle(const uint8_t* row, int64_t begin, int64_t at) {
    if constexpr (requires { Numbers::kGroup; }) {
      const int64_t column = begin % Numbers::kColumns + at;  // a block is part of a chunk, or two chunks
      const uint8_t* block = row + (begin / Numbers::kColumns + column / Numbers::kColumns) * Numbers::kBytes;
      const auto codes = Numbers::codes(block, column % Numbers::kColumns);
      return std::bit_cast<int8x16_t>(codes - static_cast<uint8_t>(Numbers::kMiddle));
    } else {
      return Numbers::from_middle(row, begin + at);
    }
  }

  // Adds the offsets times the sums of x, with vectors along the groups.
  template <int R, int N>
  static void add_offsets(const ScaledRows& rows, int64_t first, const Chunk* const (&x)[N], float* const* out) {
    const int64_t chunks = at::divup(rows.columns, kColumns);
    const float *scales = rows.scales + first * rows.groups, *offsets = rows.offsets + first * rows.groups;
    Vec sums[R][N];
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
    for_each_vector(rows.groups, [&](int64_t g, auto count) {
      unrolled<R>([&](auto r) {
        const Vec scale = load(scales + r * rows.groups + g, count),
                  offset = load(offsets + r * rows.groups + g, count);
        const Vec of_middle = at::vec::fmadd(scale, Vec(Numbers::kMiddle), offset);
        unrolled<N>([&](auto n) {
          const Vec of_x = load(reinterpret_cast<const float*>(x[n] + 2 * chunks) + g, count);
          sums[r][n] = at::vec::fmadd(of_middle, of_x, sums[r][n]);
        });
      });
    });
    unrolled<N>([&](auto n) { unrolled<R>([&](auto r) { out[n][first + r] += sum(Vec(sums[r][n])); }); });
  }

  PreparedTokenCache forms_;
};

}  // namespace moe_metal::arm
#endif
