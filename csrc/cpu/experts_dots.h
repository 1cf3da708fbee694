// `experts` with few tokens per expert: dot products at the speed of memory.
//
//   out[n][r] = sum over c of weight(r, c) * x[n][c]       for the tokens n of one expert
//
// Weights are read where they lie and become float in registers. Each sum is a chain of its own, in an order that
// depends on the matrix alone, so a token's result is the same whatever other tokens stand beside it.
#pragma once
#include <vector>

#include "experts_parts.h"

namespace moe_metal {

// The tokens of one expert: the vector that each one brings and the place of its results.
struct Tokens {
  const float* const* x;
  float* const* out;
  int64_t count;
};

// How many sums are kept in registers: AVX-512 and ARM have 32 of them, others 16. Four rows of common models stay in
// the first cache for the next tokens; a lone token takes eight, which keep more of memory's answers under way.
#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int kTokensAtOnce = 6, kVectorsOfRows = 16;
#else
constexpr int kTokensAtOnce = 2, kVectorsOfRows = 8;
#endif

// Rows that are contiguous: R rows against N tokens, vectors along the columns. Flattened, or the sums would live in
// memory.
template <int R, int N, class Scalar>
[[gnu::flatten]] inline void dot(const Matrix<Scalar>& weight, int64_t first_row, const Tokens& tokens, int64_t first) {
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
      // Rows of 2 bytes a weight are too short for the processor's own prefetching: 10 % faster, and floats slower.
      if constexpr (N == 1 && sizeof(Scalar) == 2) __builtin_prefetch(rows + (r + R) * step + column, 0, 2);
      const Vec row = load(rows + r * step + column, count);
      unrolled<N>([&](auto n) { sums[r][n] = at::vec::fmadd(row, values[n], sums[r][n]); });
    });
  });
  unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { tokens.out[first + n][first_row + r] = sum(sums[r][n]); }); });
}

template <int R, class Scalar>
inline void dot_rows(const Matrix<Scalar>& weight, int64_t row, const Tokens& tokens) {
  int64_t n = 0;
  for (; n + kTokensAtOnce <= tokens.count; n += kTokensAtOnce) dot<R, kTokensAtOnce>(weight, row, tokens, n);
  for (; n + 2 <= tokens.count; n += 2) dot<R, 2>(weight, row, tokens, n);
  for (; n < tokens.count; ++n) dot<R, 1>(weight, row, tokens, n);
}

template <class Scalar>
inline void product_by_rows(const Matrix<Scalar>& weight, const Tokens& tokens) {
  int64_t row = 0;
  for (; tokens.count == 1 && row + 8 <= weight.rows; row += 8) dot<8, 1>(weight, row, tokens, 0);
  for (; row + 4 <= weight.rows; row += 4) dot_rows<4>(weight, row, tokens);
  for (; row < weight.rows; ++row) dot_rows<1>(weight, row, tokens);
}

// Columns that are contiguous: vectors along V * kLanes rows, against N tokens, `chunk` columns from `begin`.
// Partial sums rest in `out` between chunks: that bounds both the rounding of long sums and the memory walked.
template <int V, int N, class Scalar, class Count>
[[gnu::flatten]] inline void axpy(const Matrix<Scalar>& weight, int64_t first_row, const Tokens& tokens, int64_t first,
                                  int64_t begin, int64_t end, Count count) {
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
    for (; first + 4 <= tokens.count; first += 4) axpy_rows<4>(weight, tokens, first, begin, end);
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

// Tokens that one product takes: bounds a thread's scratch. The weights stay in its cache meanwhile.
constexpr int64_t kTokens = 64;

// x, as float, for one expert's rows of gate_up; -> inner[slot, row ...] = act(gate) * up
template <class Scalar>
class GateUpDots {
 public:
  GateUpDots(const Experts& call, const Slots& slots, const float* x, float* inner)
      : call_(call), slots_(slots), x_(x), inner_(inner), both_(kTokens * 2 * kRows) {}

  void operator()(int64_t group, int64_t row) {
    const int64_t expert = slots_.experts[group], rows = std::min(kRows, call_.I - row);
    const GateUpBias bias(call_, expert, row, rows);
    for (int64_t at = slots_.begin[group]; at < slots_.begin[group + 1]; at += kTokens) {
      const int64_t* slots = slots_.order.data() + at;
      const int64_t count = std::min(kTokens, slots_.begin[group + 1] - at);
      multiply(expert, row, rows, slots, count);
      for (int64_t n = 0; n < count; ++n) {
        const float* both = both_.data() + n * 2 * kRows;
        activate_rows(call_, both, both + kRows, bias, rows, inner_ + slots[n] * call_.I + row);
      }
    }
  }

 private:
  // both[n] = kRows of gate, then kRows of up
  void multiply(int64_t expert, int64_t row, int64_t rows, const int64_t* slots, int64_t count) {
    const float* from[kTokens];
    float *gate[kTokens], *up[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = x_ + slots[n] / call_.K * call_.H;
      gate[n] = both_.data() + n * 2 * kRows;
      up[n] = gate[n] + kRows;
    }
    const auto& strides = call_.gate_up_strides;
    Matrix<Scalar> weight{call_.gate_up.data_ptr<Scalar>() + expert * strides.expert + row * strides.row, strides.row,
                          strides.column, rows, call_.H};
    if (call_.bias_stride == 2) {  // interleaved: gate and up are one run of rows
      weight.row = call_.up_offset;
      weight.rows = 2 * rows;
      product(weight, {from, gate, count});
      for (int64_t n = 0; n < count; ++n) separate(gate[n], up[n], rows);
    } else {
      product(weight, {from, gate, count});
      weight.data += call_.up_offset;
      product(weight, {from, up, count});
    }
  }

  const Experts& call_;
  const Slots& slots_;
  const float* x_;
  float* inner_;
  std::vector<float> both_;
};

// One block of the output: down of every expert, weighted and summed.
template <class Scalar>
class DownDots {
 public:
  DownDots(const Experts& call, const Slots& slots, const float* inner, int64_t size)
      : call_(call), slots_(slots), inner_(inner), size_(size), output_(call, size), results_(kTokens * kRows) {}

  void operator()(int64_t first) {
    output_.start(first);
    for (int64_t group = 0; group < slots_.used(); ++group) {
      for (int64_t row = first; row < std::min(first + size_, call_.H); row += kRows) {
        output_.expect(slots_.experts[group], row);
        for (int64_t at = slots_.begin[group]; at < slots_.begin[group + 1]; at += kTokens) {
          const int64_t count = std::min(kTokens, slots_.begin[group + 1] - at);
          add(slots_.experts[group], row, slots_.order.data() + at, count);
        }
      }
    }
    output_.finish();
  }

 private:
  void add(int64_t expert, int64_t row, const int64_t* slots, int64_t count) {
    const float* from[kTokens];
    float* to[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = inner_ + slots[n] * call_.I;
      to[n] = results_.data() + n * kRows;
    }
    const auto& strides = call_.down_strides;
    const Scalar* down = call_.down.data_ptr<Scalar>() + expert * strides.expert + row * strides.row;
    const int64_t rows = std::min(kRows, call_.H - row);
    product(Matrix<Scalar>{down, strides.row, strides.column, rows, call_.I}, {from, to, count});
    for (int64_t n = 0; n < count; ++n) output_.add(slots[n], to[n]);
  }

  const Experts& call_;
  const Slots& slots_;
  const float* inner_;
  const int64_t size_;
  OutputBlock<Scalar> output_;
  std::vector<float> results_;
};

template <class Scalar>
void experts_by_dots(const Experts& call, const Slots& slots) {
  const Tensor x = call.x.to(at::kFloat), inner = at::empty({call.T * call.K, call.I}, x.options());
  const int64_t blocks = at::divup(call.I, kRows), items = slots.used() * blocks;
  share(items, [&](auto take) {
    GateUpDots<Scalar> work(call, slots, x.data_ptr<float>(), inner.mutable_data_ptr<float>());
    for (int64_t item = take(); item < items; item = take()) work(item / blocks, item % blocks * kRows);
  });
  const int64_t size = output_block(call), outputs = at::divup(call.H, size);
  share(outputs, [&](auto take) {
    DownDots<Scalar> work(call, slots, inner.data_ptr<float>(), size);
    for (int64_t item = take(); item < outputs; item = take()) work(item * size);
  });
}

}  // namespace moe_metal
