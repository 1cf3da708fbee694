// Products of packed rows with few tokens, from vectors of float.
#pragma once
#include <vector>

#include "cpu/plan.h"
#include "cpu/weights/packed_matrix.h"

namespace moe_metal {
namespace {  // internal linkage, so that the compiler can specialise functions for their calls

// Products with few tokens: sums over the codes of a group, which are then scaled. Codes minus the middle of
// their range are multiplied: most codes are near the middle, so rounding errors are smaller. The middle's part is the
// initial value of a sum, which takes no time per code. The offsets' part is a separate product, with vectors along the
// groups.
template <class Read>
class GroupDots {
  static constexpr int64_t kGroup = Read::kGroup;
  static constexpr int kAtOnce = Read::kAtOnce;
  static constexpr int kSpan = PackedMatrix<Read>::kSpan;

 public:
  static constexpr bool kExists = kUnpacksInRegisters && (kGroup == 0 || kGroup >= 2 * kLanes);
  static constexpr bool kTakesAll = kExists && kGroup != 0;  // all weights of the format
  static bool takes(const ScaledRows& rows, int64_t tokens) {
    constexpr int kMost = kVectorRegisters == 32 ? 4 : kWorthTransposing - 1;
    const int64_t group = int64_t{1} << rows.shift;
    return kExists && group >= 2 * kLanes && rows.columns % group == 0 && tokens <= kMost;
  }

  void operator()(const PackedMatrix<Read>& weight, const Tokens& tokens) {
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
  void multiply(const PackedMatrix<Read>& weight, float* const* out, int64_t first) const {
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
  static int64_t spans_of(const PackedMatrix<Read>& weight) { return weight.groups / kSpan; }

  void lay_out(const PackedMatrix<Read>& weight, const Tokens& tokens) {
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
          Vec vecs[kAtOnce];
          for (int64_t v = 0; v < kAtOnce; ++v) vecs[v] = Vec::loadu(from + v * kLanes);
          Read::permute_like_load(vecs);
          for (int64_t v = 0; v < kAtOnce; ++v) vecs[v].store(x + v * kLanes), all = all + vecs[v];
        }
        (all * Vec(-Read::kMiddle)).store(begin);
      }
    }
    laid_out_.assign(tokens.x, tokens.x + tokens.count);
  }

  template <int N, class Span>
  void all_rows(const PackedMatrix<Read>& weight, const LaidOut& tokens, float* const* out, Span span) const {
    // R * N * G sums should fit in the registers.
    constexpr int G = N == 1 || kLanes == 16 ? 2 : 1, R = N <= 2 ? 4 : 2;
    weight.template for_blocks<R>([&](auto rows, int64_t row, const uint8_t* ahead) {
      multiply_block<rows, N, G>(weight, row, tokens, out, span, ahead);
    });
  }

  template <int R, int N, int G, class Span>
  [[gnu::flatten]] void multiply_block(const PackedMatrix<Read>& weight, int64_t first, const LaidOut& tokens,
                                       float* const* out, Span span, const uint8_t* ahead) const {
    const auto rows = weight.row_block(first);
    const int64_t spans = spans_of(weight);
    Vec sums[R][N];
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
    int64_t s = 0;
    for (; s + G <= spans; s += G) add_spans<R, N, G>(rows, tokens, s, span, ahead, sums);
    for (; s < spans; ++s) add_spans<R, N, 1>(rows, tokens, s, span, ahead, sums);
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

  // Adds the products of G spans of R rows.
  template <int R, int N, int G, class Span>
  [[gnu::always_inline]] inline void add_spans(const typename PackedMatrix<Read>::RowBlock& rows, const LaidOut& tokens,
                                               int64_t s, Span span, const uint8_t* ahead, Vec (&sums)[R][N]) const {
    const PackedMatrix<Read>& weight = rows.all;
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
        const uint8_t* line = ahead + R * PackedMatrix<Read>::bytes(column);  // in address order
        for (int64_t at = 0; at < R * PackedMatrix<Read>::bytes(kStep); at += kLine)
          __builtin_prefetch(line + at, 0, 2);
        MOE_METAL_UNROLL for (int r = 0; r < R; ++r) {
          Vec codes[kAtOnce];
          Read::load_permuted(rows.data + r * weight.row, column, codes);
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
        const Vec scale = PackedMatrix<Read>::of_span(rows.scales + r * weight.groups + (s + i) * kSpan);
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
