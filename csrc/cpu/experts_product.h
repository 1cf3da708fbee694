// The inner loop of `experts`: a few rows of one expert's weight matrix times a few tokens.
//
//   out[n][r] = sum over c of weight(r, c) * x[n][c]
//
// Weights are read where they lie and become float in registers. Each sum has a chain of its own, in an order that
// depends on the matrix alone, so a token's result is the same whatever other tokens stand beside it.
#pragma once
#include <vector>

#include "vec.h"

namespace moe_metal {

// Element (r, c) of a matrix stands at data[r * row + c * column].
template <class Scalar>
struct Matrix {
  const Scalar* data;
  int64_t row, column;
  int64_t rows, columns;
};

// The tokens of one expert: the vector that each one brings and the place of its results.
struct Tokens {
  const float* const* x;
  float* const* out;
  int64_t count;
};

// How many sums are kept in registers: AVX-512 and SVE-class machines have 32 of them, others 16.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int kRowsAtOnce = 4, kTokensAtOnce = 4, kVectorsOfRows = 16;
#else
constexpr int kRowsAtOnce = 4, kTokensAtOnce = 2, kVectorsOfRows = 8;
#endif

// body(integral_constant 0) ... body(integral_constant N-1), so that arrays of vectors stay in registers.
template <int N, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, N>());
}

// Rows that are contiguous: R rows against N tokens, vectors along the columns.
template <int R, int N, class Scalar>
inline void dot(const Matrix<Scalar>& weight, int64_t first_row, const Tokens& tokens, int64_t first) {
  Vec sums[R][N];
  unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
  const Scalar* rows = weight.data + first_row * weight.row;
  const int64_t step = weight.row;
  const float* x[N];
  unrolled<N>([&](auto n) { x[n] = tokens.x[first + n]; });
  for_each_vector(weight.columns, [&](int64_t column, auto count) __attribute__((always_inline)) {
    Vec values[N];
    unrolled<N>([&](auto n) { values[n] = load(x[n] + column, count); });
    unrolled<R>([&](auto r) {
      const Vec row = load(rows + r * step + column, count);
      unrolled<N>([&](auto n) { sums[r][n] = at::vec::fmadd(row, values[n], sums[r][n]); });
    });
  });
  unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { tokens.out[first + n][first_row + r] = sum(sums[r][n]); }); });
}

template <int R, class Scalar>
inline void dot_rows(const Matrix<Scalar>& weight, int64_t first_row, const Tokens& tokens) {
  int64_t first = 0;
  for (; first + kTokensAtOnce <= tokens.count; first += kTokensAtOnce) {
    dot<R, kTokensAtOnce>(weight, first_row, tokens, first);
  }
  for (; first < tokens.count; ++first) dot<R, 1>(weight, first_row, tokens, first);
}

template <class Scalar>
inline void product_by_rows(const Matrix<Scalar>& weight, const Tokens& tokens) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= weight.rows; row += kRowsAtOnce) dot_rows<kRowsAtOnce>(weight, row, tokens);
  for (; row < weight.rows; ++row) dot_rows<1>(weight, row, tokens);
}

// Columns that are contiguous: vectors along V * kLanes rows, against N tokens, `chunk` columns from `begin`.
// Partial sums rest in `out` between chunks: that bounds both the rounding of long sums and the memory walked.
template <int V, int N, class Scalar, class Count>
inline void axpy(const Matrix<Scalar>& weight, int64_t first_row, const Tokens& tokens, int64_t first, int64_t begin,
                 int64_t end, Count count) {
  Vec sums[V][N];
  unrolled<V>([&](auto v) { unrolled<N>([&](auto n) { sums[v][n] = Vec(0); }); });
  const Scalar* rows = weight.data + first_row;
  const float* x[N];
  unrolled<N>([&](auto n) { x[n] = tokens.x[first + n]; });
  for (int64_t column = begin; column < end; ++column) {
    const Scalar* here = rows + column * weight.column;
    Vec values[N];
    unrolled<N>([&](auto n) { values[n] = Vec(x[n][column]); });
    unrolled<V>([&](auto v) {
      const Vec vec = load(here + v * kLanes, count);
      unrolled<N>([&](auto n) { sums[v][n] = at::vec::fmadd(vec, values[n], sums[v][n]); });
    });
  }
  unrolled<V>([&](auto v) {
    unrolled<N>([&](auto n) {
      float* out = tokens.out[first + n] + first_row + v * kLanes;
      store(out, begin ? load(out, count) + sums[v][n] : sums[v][n], count);
    });
  });
}

template <int N, class Scalar>
inline void axpy_rows(const Matrix<Scalar>& weight, const Tokens& tokens, int64_t first, int64_t begin, int64_t end) {
  constexpr int V = kVectorsOfRows / N;
  int64_t row = 0;
  for (; row + V * kLanes <= weight.rows; row += V * kLanes) {
    axpy<V, N>(weight, row, tokens, first, begin, end, Whole());
  }
  for (; row + kLanes <= weight.rows; row += kLanes) axpy<1, N>(weight, row, tokens, first, begin, end, Whole());
  if (row < weight.rows) axpy<1, N>(weight, row, tokens, first, begin, end, weight.rows - row);
}

template <class Scalar>
inline void product_by_columns(const Matrix<Scalar>& weight, const Tokens& tokens) {
  constexpr int64_t kChunk = 512;
  for (int64_t begin = 0; begin < weight.columns; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, weight.columns);
    int64_t first = 0;
    for (; first + kTokensAtOnce <= tokens.count; first += kTokensAtOnce) {
      axpy_rows<kTokensAtOnce>(weight, tokens, first, begin, end);
    }
    for (; first < tokens.count; ++first) axpy_rows<1>(weight, tokens, first, begin, end);
  }
}

// Neither is contiguous: rows are gathered a few at a time. Right for any strides, and not meant to be fast.
template <class Scalar>
inline void product_gathered(const Matrix<Scalar>& weight, const Tokens& tokens) {
  std::vector<float> row(weight.columns);
  std::vector<float*> out(tokens.count);
  for (int64_t r = 0; r < weight.rows; ++r) {
    const Scalar* from = weight.data + r * weight.row;
    for (int64_t c = 0; c < weight.columns; ++c) row[c] = static_cast<float>(from[c * weight.column]);
    for (int64_t n = 0; n < tokens.count; ++n) out[n] = tokens.out[n] + r;
    product_by_rows(Matrix<float>{row.data(), 0, 1, 1, weight.columns}, {tokens.x, out.data(), tokens.count});
  }
}

template <class Scalar>
inline void product(const Matrix<Scalar>& weight, const Tokens& tokens) {
  if (weight.column == 1) return product_by_rows(weight, tokens);
  if (weight.row == 1) return product_by_columns(weight, tokens);
  product_gathered(weight, tokens);
}

}  // namespace moe_metal
