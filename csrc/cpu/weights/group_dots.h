// Packed rows as vectors of float, and their products with few tokens.
#pragma once
#include <vector>

#include "cpu/plan.h"
#include "cpu/weights/scaled_rows.h"

namespace moe_metal {
namespace {  // internal linkage, so that the compiler can specialise functions for their calls

// The interface of packed rows for products.
template <class Read>
struct Packed : ScaledRows {
  static constexpr int kAtOnce = Read::kAtOnce;
  Read read;

  // The columns of load_permuted() are of one group or, with AVX2 and the groups of 16 columns in GGML's blocks, of
  // two, each of which has half of the lanes. kSpan is how many groups they are.
  static constexpr int kSpan = Read::kGroup == 0 ? 1 : std::max<int>(kAtOnce * kLanes / Read::kGroup, 1);
  // The scales (or offsets) of the lanes of a span.
  [[gnu::always_inline]] static Vec of_span(const float* from) {
#if defined(MOE_METAL_HAS_AVX2) && !defined(MOE_METAL_HAS_AVX512)
    if constexpr (kSpan == 2) {
      double both;
      std::memcpy(&both, from, sizeof(both));
      return _mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    }
#endif
    return Vec(*from);
  }

  struct RowBlock {
    const Packed& all;
    const uint8_t* data;
    const float *scales, *offsets;
    template <class Count>
    [[gnu::always_inline]] Vec load(int64_t r, int64_t column, Count count) const {
      const int64_t group = r * all.groups + (column >> all.shift);
      const Vec codes = all.read(data + r * all.row, column, count), scale(scales[group]);
      const Vec values = Read::kOffset ? at::vec::fmadd(codes, scale, Vec(offsets[group])) : codes * scale;
      if constexpr (std::is_same_v<Count, Whole>) return values;
      return Vec::set(Vec(0), values, count);
    }
    // The values of several vectors of columns, in the order of the reader's load_permuted().
    [[gnu::always_inline]] void load_permuted(int64_t r, int64_t column, Vec (&to)[kAtOnce]) const {
      all.read.load_permuted(data + r * all.row, column, to);
      const int64_t group = r * all.groups + (column >> all.shift);
      const Vec scale = of_span(scales + group) * Vec(Read::kUnit);
      MOE_METAL_UNROLL for (Vec& some : to) {
        if constexpr (Read::kOffset)
          some = at::vec::fmadd(some, scale, of_span(offsets + group));
        else
          some = (some - Vec(Read::kMiddle)) * scale;
      }
    }
    // See Matrix::RowBlock. Each half of the columns must have one scale.
    int64_t transposed_columns() const {
      const int64_t columns = Read::transposed_columns();
      return int64_t{2} << all.shift >= columns ? columns : 0;
    }
    template <class Use>
    void transposed(int64_t column, Use&& use) const
      requires requires { all.read.transposed(data, all.row, column, use); }
    {
      const int64_t half = Read::transposed_columns() / 2;
      const bool same = column >> all.shift == (column + half) >> all.shift;
      const auto rows = at::vec::Vectorized<int32_t>::arange(0, static_cast<int32_t>(all.groups));
      const auto read = [&](const float* from, Vec(&of_halves)[2]) {
        of_halves[0] = at::vec::gather<4>(from + (column >> all.shift), rows);
        of_halves[1] = same ? of_halves[0] : at::vec::gather<4>(from + ((column + half) >> all.shift), rows);
      };
      Vec scale[2], offset[2];
      read(scales, scale);
      if constexpr (Read::kOffset) read(offsets, offset);
      all.read.transposed(data, all.row, column, [&](int64_t i, const Vec& codes) {
        const bool second = i >= half;
        if constexpr (Read::kOffset)
          use(i, at::vec::fmadd(codes, scale[second], offset[second]));
        else
          use(i, (codes - Vec(Read::kMiddle)) * scale[second]);
      });
    }
    // The rest of the row from a column on, up to a vector; 0 past the end.
    Vec load_part(int64_t r, int64_t column) const {
      const int64_t count = std::min(all.columns - column, kLanes);
      return count <= 0 ? Vec(0) : count == kLanes ? load(r, column, Whole()) : load(r, column, count);
    }
    // Packed rows are too short for the hardware prefetcher.
    [[gnu::always_inline]] void prefetch(int64_t r, int64_t column) const {
      __builtin_prefetch(data + r * all.row + bytes(column), 0, 2);
    }
  };
  RowBlock row_block(int64_t first) const {
    return {*this, data + first * row, scales + first * groups, offsets + first * groups};
  }
  const void* place(int64_t r, int64_t column) const { return data + r * row + bytes(column); }
  int64_t row_bytes() const { return row; }
  static constexpr int64_t bytes(int64_t columns) { return columns * Read::kBytes / Read::kColumns; }

  // Whether Panel uses load_permuted(). With AVX-512 it gains nothing.
  bool loads_permuted() const {
    return kUnpacksInRegisters && kLanes == 8 && int64_t{1} << shift >= kAtOnce * kLanes / kSpan;
  }
  // The columns of the lanes of load_permuted().
  std::array<int32_t, kAtOnce * kLanes> permuted_columns() const {
    Vec x[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) x[v] = Vec::arange(v * kLanes, 1);
    read.codes.permute_like_load(x);
    std::array<int32_t, kAtOnce * kLanes> columns;
    for (int v = 0; v < kAtOnce; ++v) at::vec::convert_to_int_of_same_size(x[v]).store(&columns[v * kLanes]);
    return columns;
  }
};

// Products with up to kMost tokens: sums over the codes of a group, which are then scaled. Integers are centred at the
// middle of their range, near which most of them are, for smaller rounding errors: the sum of a group begins with the
// contribution of the middle, which costs nothing per number. The offsets' contribution is a separate product, with
// vectors along the groups.
template <class Read>
class GroupDots {
  static constexpr int64_t kGroup = Read::kGroup;
  static constexpr int kAtOnce = Read::kAtOnce;
  static constexpr int kSpan = Packed<Read>::kSpan;

 public:
  static constexpr bool kExists = kUnpacksInRegisters && (kGroup == 0 || kGroup >= 2 * kLanes);
  static constexpr bool kTakesAll = kExists && kGroup != 0;  // all weights of the format

  static constexpr int kMost = kVectorRegisters == 32 ? 4 : kWorthTransposing - 1;

  void operator()(const Packed<Read>& weight, const Tokens& tokens) {
    if (!std::equal(tokens.x, tokens.x + tokens.count, laid_out_.begin(), laid_out_.end())) lay_out(weight, tokens);
    for (int64_t first = 0; first < tokens.count; first += kAtATime) {
      unrolled<kAtATime>([&](auto i) {
        if (std::min(kAtATime, tokens.count - first) == i + 1) multiply<i + 1>(weight, tokens.out + first, first);
      });
    }
  }

 private:
  static constexpr int64_t kAtATime = 4;

  // Tokens as they are multiplied: their numbers in the order of the codes, the sum of each group, and the initial
  // value of each span's sum of products.
  struct LaidOut {
    const float *x, *sums, *begin;
  };

  // Multiplies N tokens from `first` on.
  template <int N>
  void multiply(const Packed<Read>& weight, float* const* out, int64_t first) const {
    const int64_t group = int64_t{1} << weight.shift;
    const LaidOut tokens = {&x_[first * weight.columns], &sums_[first * weight.groups],
                            &begin_[first * spans_of(weight) * kLanes]};
    if constexpr (kGroup != 0) {
      all_rows<N>(weight, tokens, out, std::integral_constant<int64_t, kGroup * kSpan>());
    } else if (group == Read::kUsualGroup) {
      all_rows<N>(weight, tokens, out, std::integral_constant<int64_t, Read::kUsualGroup>());
    } else {
      all_rows<N>(weight, tokens, out, group);
    }
  }
  static int64_t spans_of(const Packed<Read>& weight) { return weight.groups / kSpan; }

  void lay_out(const Packed<Read>& weight, const Tokens& tokens) {
    constexpr int64_t kStep = kAtOnce * kLanes;
    const int64_t group = int64_t{1} << weight.shift, spans = spans_of(weight);
    if (tokens.count > static_cast<int64_t>(laid_out_.size())) {
      x_ = scratch<float>(tokens.count * weight.columns);
      sums_ = scratch<float>(tokens.count * weight.groups);
      begin_ = scratch<float>(tokens.count * spans * kLanes);
    }
    float *x = x_.get(), *sums = sums_.get(), *begin = begin_.get();
    for (int64_t n = 0; n < tokens.count; ++n) {
      const float* from = tokens.x[n];
      for (int64_t g = 0; Read::kOffset && g < weight.groups; ++g) *sums++ = sum_of(from + g * group, group);
      for (int64_t s = 0; s < spans; ++s, begin += kLanes) {
        Vec all(0);
        for (int64_t c = 0; c < kSpan * group; c += kStep, from += kStep, x += kStep) {
          Vec some[kAtOnce];
          for (int64_t v = 0; v < kAtOnce; ++v) some[v] = Vec::loadu(from + v * kLanes);
          weight.read.codes.permute_like_load(some);
          for (int64_t v = 0; v < kAtOnce; ++v) some[v].store(x + v * kLanes), all = all + some[v];
        }
        (all * Vec(-Read::kMiddle)).store(begin);
      }
    }
    laid_out_.assign(tokens.x, tokens.x + tokens.count);
  }

  template <int N, class Span>
  void all_rows(const Packed<Read>& weight, const LaidOut& tokens, float* const* out, Span span) const {
    // R * N * G sums should fit in the registers.
    constexpr int G = N == 1 || kLanes == 16 ? 2 : 1, R = N <= 2 ? 4 : 2;
    weight.template for_blocks<R>([&](auto rows, int64_t row, const uint8_t* ahead) {
      multiply_block<rows, N, G>(weight, row, tokens, out, span, ahead);
    });
  }

  template <int R, int N, int G, class Span>
  [[gnu::flatten]] void multiply_block(const Packed<Read>& weight, int64_t first, const LaidOut& tokens,
                                       float* const* out, Span span, const uint8_t* ahead) const {
    const auto rows = weight.row_block(first);
    const int64_t spans = spans_of(weight);
    Vec sums[R][N];
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
    int64_t s = 0;
    for (; s + G <= spans; s += G) some_spans<R, N, G>(rows, tokens, s, span, ahead, sums);
    for (; s < spans; ++s) some_spans<R, N, 1>(rows, tokens, s, span, ahead, sums);
    if constexpr (Read::kOffset) {
      for_each_vector(weight.groups, [&](int64_t g, auto count) {
        Vec sums_of_x[N];
        unrolled<N>([&](auto n) { sums_of_x[n] = load(&tokens.sums[n * weight.groups + g], count); });
        unrolled<R>([&](auto r) {
          const int64_t at = r * weight.groups + g;
          const Vec scale = load(rows.scales + at, count), offset = load(rows.offsets + at, count);
          const Vec of_middle = at::vec::fmadd(scale, Vec(Read::kMiddle), offset);
          unrolled<N>([&](auto n) { sums[r][n] = at::vec::fmadd(of_middle, sums_of_x[n], sums[r][n]); });
        });
      });
    }
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { out[n][first + r] = sum(sums[r][n]); }); });
  }

  // Products of G spans of R rows.
  template <int R, int N, int G, class Span>
  [[gnu::always_inline]] inline void some_spans(const typename Packed<Read>::RowBlock& rows, const LaidOut& tokens,
                                                int64_t s, Span span, const uint8_t* ahead, Vec (&sums)[R][N]) const {
    const Packed<Read>& weight = rows.all;
    const int64_t spans = spans_of(weight);
    Vec parts[R][N][G];
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      MOE_METAL_UNROLL for (int i = 0; i < G; ++i) {
        const Vec begin = Read::kMiddle != 0 ? Vec::loadu(&tokens.begin[(n * spans + s + i) * kLanes]) : Vec(0);
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) parts[r][n][i] = begin;
      }
    }
    constexpr int64_t kStep = kAtOnce * kLanes;
    const float* x = tokens.x + s * span;
    for (int64_t c = 0; c < span; c += kStep) {
      MOE_METAL_UNROLL for (int i = 0; i < G; ++i) {
        const int64_t here = c + i * span, column = s * span + here;
        const uint8_t* line = ahead + R * Packed<Read>::bytes(column);  // in address order
        for (int64_t at = 0; at < R * Packed<Read>::bytes(kStep); at += kLine) __builtin_prefetch(line + at, 0, 2);
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          Vec codes[kAtOnce];
          weight.read.load_permuted(rows.data + r * weight.row, column, codes);
          MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
            MOE_METAL_UNROLL for (int v = 0; v < kAtOnce; ++v) {
              Vec& part = parts[r][n][i];
              part = at::vec::fmadd(codes[v], Vec::loadu(x + n * weight.columns + here + v * kLanes), part);
            }
          }
        }
      }
    }
    MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
      MOE_METAL_UNROLL for (int i = 0; i < G; ++i) {
        const Vec scale = Packed<Read>::of_span(rows.scales + r * weight.groups + (s + i) * kSpan);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          if constexpr (Read::kUnit != 1) parts[r][n][i] = parts[r][n][i] * Vec(Read::kUnit);
          sums[r][n] = at::vec::fmadd(scale, parts[r][n][i], sums[r][n]);
        }
      }
    }
  }

  std::unique_ptr<float[], Free> x_, sums_, begin_;
  std::vector<const float*> laid_out_;  // the tokens of x_, which must not change during the lifetime of this object
};

}  // namespace
}  // namespace moe_metal
