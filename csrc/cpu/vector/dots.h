// Products of a matrix with few vectors, as dot products, limited by memory bandwidth.
//
//   out[n][r] = sum over c of weight(r, c) * x[n][c]
//
// Weights are read in place and converted to float in registers, or, for many vectors, in a panel that stays in cache.
// The order of each sum depends only on the matrix and on whether there is a panel.
#pragma once
#include <optional>
#include <vector>

#include "cpu/vector/vec.h"

namespace moe_metal {

// Tokens in another form, which the products of all threads share.
struct PreparedTokens {
  virtual ~PreparedTokens() = default;
};

// The tokens that are multiplied by one matrix: the input and the output of each.
struct Tokens {
  const float* const* x;
  float* const* out;
  int64_t count;
  const PreparedTokens* prepared = nullptr;  // by prepare_tokens(), or null
};

// How many sums are kept in registers. Four rows of common models stay in the L1 cache for the next tokens. One or two
// tokens take eight rows, which keeps more loads in flight.
constexpr int kTokensAtOnce = kVectorRegisters == 32 ? 6 : 3, kVectorsOfRows = kVectorRegisters / 2;

// R contiguous rows times N tokens, with vectors along the columns. Without `flatten` the sums would be kept in memory.
template <int R, int N, class Reader>
[[gnu::flatten]] inline void dot(const Reader& weight, int64_t first_row, const Tokens& tokens, int64_t first) {
  Vec sums[R][N];
  unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
  const auto rows = weight.row_block(first_row);
  const float* x[N];
  unrolled<N>([&](auto n) { x[n] = tokens.x[first + n]; });
  for_each_vector(weight.columns, [&](int64_t column, auto count) __attribute__((always_inline)) {
    Vec values[N];
    unrolled<N>([&](auto n) { values[n] = load(x[n] + column, count); });
    unrolled<R>([&](auto r) {
      if constexpr (N == 1) rows.prefetch(r + R, column);
      const Vec row = rows.load(r, column, count);
      unrolled<N>([&](auto n) { sums[r][n] = at::vec::fmadd(row, values[n], sums[r][n]); });
    });
  });
  unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { tokens.out[first + n][first_row + r] = sum(sums[r][n]); }); });
}

template <int R, class Reader>
inline void dot_rows(const Reader& weight, int64_t row, const Tokens& tokens) {
  int64_t n = 0;
  for (; n + kTokensAtOnce <= tokens.count; n += kTokensAtOnce) dot<R, kTokensAtOnce>(weight, row, tokens, n);
  if constexpr (kTokensAtOnce > 4) {
    for (; n + 4 <= tokens.count; n += 4) dot<R, 4>(weight, row, tokens, n);
  }
  for (; n + 2 <= tokens.count; n += 2) dot<R, 2>(weight, row, tokens, n);
  for (; n < tokens.count; ++n) dot<R, 1>(weight, row, tokens, n);
}

#ifdef MOE_METAL_HAS_AVX2
// The same for R rows of bfloat16 and one token, with fewer instructions: of two neighbours in 32 bits, a shift
// converts one to float and a mask the other. x is deinterleaved to match, once for all rows.
template <int R>
[[gnu::flatten]] inline void dot_pairs(const Matrix<at::BFloat16>& weight, int64_t first_row, const Tokens& tokens) {
  using Pairs = at::vec::Vectorized<int32_t>;
  const Pairs half(16);
  const Vec upper_half(std::bit_cast<float>(0xffff0000));
  Vec sums[R];
  unrolled<R>([&](auto r) { sums[r] = Vec(0); });
  const at::BFloat16* rows = weight.data + first_row * weight.row;
  const float* x = tokens.x[0];
  int64_t column = 0;
  for (; column + 2 * kLanes <= weight.columns; column += 2 * kLanes) {
    const auto [even, odd] = at::vec::deinterleave2(Vec::loadu(x + column), Vec::loadu(x + column + kLanes));
    unrolled<R>([&](auto r) {
      const at::BFloat16* here = rows + r * weight.row + column;
      __builtin_prefetch(here + R * weight.row, 0, 2);
      const Pairs pairs = Pairs::loadu(here);
      sums[r] = at::vec::fmadd(at::vec::cast<float>(pairs << half), even, sums[r]);
      sums[r] = at::vec::fmadd(at::vec::cast<float>(pairs) & upper_half, odd, sums[r]);
    });
  }
  for_each_vector(weight.columns - column, [&](int64_t i, auto count) __attribute__((always_inline)) {
    const Vec value = load(x + column + i, count);
    unrolled<R>(
        [&](auto r) { sums[r] = at::vec::fmadd(load(rows + r * weight.row + column + i, count), value, sums[r]); });
  });
  unrolled<R>([&](auto r) { tokens.out[0][first_row + r] = sum(sums[r]); });
}
#endif

template <class Reader>
void product_by_rows(const Reader& weight, const Tokens& tokens) {
  int64_t row = 0;
#ifdef MOE_METAL_HAS_AVX2
  if constexpr (std::is_same_v<Reader, Matrix<at::BFloat16>>) {
    // Two rows at a time reach 88 % of the memory bandwidth on 2 cores without AMX, four 86 % and eight 83 %.
    for (; tokens.count == 1 && row + 2 <= weight.rows; row += 2) dot_pairs<2>(weight, row, tokens);
  }
#endif
  for (; tokens.count == 1 && row + 8 <= weight.rows; row += 8) dot<8, 1>(weight, row, tokens, 0);
  if constexpr (kTokensAtOnce > 4) {
    for (; tokens.count == 2 && row + 8 <= weight.rows; row += 8) dot<8, 2>(weight, row, tokens, 0);
  }
  for (; row + 4 <= weight.rows; row += 4) dot_rows<4>(weight, row, tokens);
  for (; row < weight.rows; ++row) dot_rows<1>(weight, row, tokens);
}

// V * kLanes rows times N tokens, with vectors along the rows, for weights with contiguous columns that are `step`
// apart. Multiplies the columns [begin, end); `weight` points to the first of them. Partial sums are kept in `out`
// between calls: that bounds both the rounding errors of long sums and the memory that a call reads.
// `prefetch` is called for each column.
template <int V, int N, class Scalar, class Count, class Prefetch = decltype([] {})>
[[gnu::flatten, gnu::noinline]] inline void axpy(const Scalar* weight, int64_t step, int64_t first_row,
                                                 const Tokens& tokens, int64_t first, int64_t begin, int64_t end,
                                                 Count count, Prefetch prefetch = {}) {
  // These are loops because GCC 12 keeps the sums in memory if unrolled<>() is used with AVX2.
  Vec sums[V][N];
  const float* x[N];
  MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
    x[n] = tokens.x[first + n];
    MOE_METAL_UNROLL for (int v = 0; v < V; ++v) sums[v][n] = Vec(0);
  }
  _Pragma("GCC unroll 2") for (int64_t column = begin; column < end; ++column) {
    const Scalar* here = weight + (column - begin) * step;
    prefetch();
    if constexpr (V < N) {  // keeps the values in registers of which there are fewer
      Vec vecs[V];
      MOE_METAL_UNROLL for (int v = 0; v < V; ++v) vecs[v] = load(here + v * kLanes, count);
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
        const Vec value(x[n][column]);
        MOE_METAL_UNROLL for (int v = 0; v < V; ++v) sums[v][n] = at::vec::fmadd(vecs[v], value, sums[v][n]);
      }
    } else {
      Vec values[N];
      MOE_METAL_UNROLL for (int n = 0; n < N; ++n) values[n] = Vec(x[n][column]);
      MOE_METAL_UNROLL for (int v = 0; v < V; ++v) {
        const Vec vec = load(here + v * kLanes, count);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) sums[v][n] = at::vec::fmadd(vec, values[n], sums[v][n]);
      }
    }
  }
  MOE_METAL_UNROLL for (int v = 0; v < V; ++v) {
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      float* out = tokens.out[first + n] + first_row + v * kLanes;
      store(out, begin ? load(out, count) + sums[v][n] : sums[v][n], count);
    }
  }
}

template <int N, class Scalar>
inline void axpy_rows(const Matrix<Scalar>& weight, const Tokens& tokens, int64_t first, int64_t begin, int64_t end) {
  constexpr int V = kVectorsOfRows / N;
  const Scalar* from = weight.data + begin * weight.column;
  const int64_t rows = weight.rows, step = weight.column;
  int64_t row = 0;
  for (; row + V * kLanes <= rows; row += V * kLanes) {
    axpy<V, N>(from + row, step, row, tokens, first, begin, end, Whole());
  }
  for (; row + kLanes <= rows; row += kLanes) axpy<1, N>(from + row, step, row, tokens, first, begin, end, Whole());
  if (row < rows) axpy<1, N>(from + row, step, row, tokens, first, begin, end, rows - row);
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

// Contiguous rows times many tokens: a panel of some rows and columns is transposed in cache, as float, and multiplied
// like contiguous columns. That takes fewer loads per product, and no sum across a vector per result.
class Panel {
  static constexpr int kVectors = 2, kWideVectors = kVectorRegisters == 32 ? 4 : kVectors, kMostTokens = 8;
  static constexpr int64_t kPanelColumns = 256;

 public:
  static constexpr int64_t kPanelRows = kVectors * kLanes;
  // More tokens are multiplied by all rows of some columns first, so that their numbers stay in the L2 cache. For
  // fewer, whole rows are read in the order of the memory: at T = 32 that takes 0.95 of the time. With 32 registers,
  // more tokens are also multiplied by wide panels, which take fewer loads per product but do not fit in the L1 cache:
  // in float on an Intel, 256 tokens for each of 128 experts take 0.90 to 0.94 of the time, and 32 tokens would
  // take up to 1.05.
  static constexpr int64_t kManyTokens = 64;

  // `out` must have room for whole panels of kPanelRows: results of rows beyond the last are 0.
  template <class Reader>
  void product(const Reader& weight, const Tokens& tokens) {
    constexpr int64_t kWideRows = kWideVectors * kLanes;
    const int64_t wide = tokens.count > kManyTokens ? weight.rows / kWideRows * kWideRows : 0;
    spare_.resize(at::divup(weight.rows, kPanelRows) * kPanelRows);
    product_of_rows<kWideVectors>(weight, 0, wide, tokens);
    product_of_rows<kVectors>(weight, wide, weight.rows, tokens);
  }

 private:
  // For the rows [first, last), with panels of V vectors of rows.
  template <int V, class Reader>
  void product_of_rows(const Reader& weight, int64_t first, int64_t last, const Tokens& tokens) {
    const bool down_first = tokens.count > kManyTokens;
    constexpr int64_t kRows = V * kLanes;
    const int64_t down = at::divup(last - first, kRows), across = at::divup(weight.columns, kPanelColumns);
    const auto panel_at = [&](int64_t i) {
      if (i == down * across) return std::pair(first + down * kRows, int64_t{0});
      return down_first ? std::pair(first + i % down * kRows, i / down * kPanelColumns)
                        : std::pair(first + i / across * kRows, i % across * kPanelColumns);
    };
    for (int64_t i = 0; i < down * across; ++i) {
      const auto [row, begin] = panel_at(i);
      const auto [next_row, next_begin] = panel_at(i + 1);
      const int64_t end = std::min(begin + kPanelColumns, weight.columns);
      fill<V>(weight, row, begin, end);
      PanelPrefetch<V> prefetch(weight.address(next_row, next_begin), weight.row_bytes(), weight.bytes(kPanelColumns));
      multiply<V>(row, tokens, begin, end, prefetch);
    }
  }

  // Prefetches the next panel, a cache line at a time, while this one is multiplied.
  template <int V>
  class PanelPrefetch {
   public:
    PanelPrefetch(const void* panel, int64_t step, int64_t bytes)
        : row_(static_cast<const char*>(panel)), step_(step), bytes_(bytes) {}
    void operator()() {
      if (rows_ == V * kLanes) return;
      __builtin_prefetch(row_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, row_ += step_, ++rows_;
    }

   private:
    const char* row_;
    int64_t step_, bytes_, at_ = 0, rows_ = 0;
  };

  // Multiplies the panel by all tokens. With AVX2, six at a time take 15 of 16 registers. In a loop of its own that is
  // 1.4 to 1.8 times as fast as four on a Zen 3, because fewer loads are needed for a product.
  template <int V>
  void multiply(int64_t row, const Tokens& tokens, int64_t begin, int64_t end, PanelPrefetch<V>& prefetch) {
    constexpr int N = V < kWideVectors ? kMostTokens : 6;
    int64_t n = 0;
    for (; n + N <= tokens.count; n += N) multiply_few<V, N>(row, tokens, n, begin, end, prefetch);
    if (n + N / 2 < tokens.count)
      multiply_few<V, N>(row, padded_tail(tokens, n, N), 0, begin, end, prefetch);
    else if (n < tokens.count)
      multiply_few<V, N / 2>(row, padded_tail(tokens, n, N / 2), 0, begin, end, prefetch);
  }
  template <int V, int N>
  void multiply_few(int64_t row, const Tokens& tokens, int64_t first, int64_t begin, int64_t end,
                    PanelPrefetch<V>& prefetch) {
    PanelPrefetch<V> here = prefetch;  // a local copy stays in registers
    axpy<V, N>(floats_.get(), V * kLanes, row, tokens, first, begin, end, Whole(), [&] { here(); });
    prefetch = here;
  }

  // The remaining tokens; the last one is repeated to make them `count`.
  Tokens padded_tail(const Tokens& tokens, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const bool is = first + i < tokens.count;
      tail_x_[i] = tokens.x[is ? first + i : tokens.count - 1];
      tail_out_[i] = is ? tokens.out[first + i] : spare_.data();
    }
    return {tail_x_, tail_out_, count};
  }

  template <int V, class Reader>
  void fill(const Reader& weight, int64_t row, int64_t begin, int64_t end) {
    constexpr int64_t kRows = V * kLanes;
    for (int64_t r = 0; r < kRows; r += kLanes) {
      const int64_t rows = std::clamp<int64_t>(weight.rows - row - r, 0, kLanes);
      const auto from = weight.row_block(row + r);
      float* to = floats_.get() + r;
      int64_t column = begin;
      if constexpr (requires { from.transposed(column, [](int64_t, const Vec&) {}); }) {
        if (rows == kLanes) column = fill_transposed<V>(from, begin, end, to);
      }
      if constexpr (requires(Sixteen& values) { from.sixteen(0, column, values); }) {
        if (rows == kLanes) column = fill_by_sixteen<V>(from, column, end, to + (column - begin) * kRows);
      }
      for (; column < end; column += kLanes) {
        const int64_t columns = std::min(kLanes, end - column);
        Vec tile[kLanes];
        if (rows == kLanes && columns == kLanes) {
          for (int64_t i = 0; i < kLanes; ++i) tile[i] = from.load(i, column, Whole());
        } else {
          for (int64_t i = 0; i < kLanes; ++i) tile[i] = i < rows ? from.load(i, column, columns) : Vec(0);
        }
        transpose(tile);
        for (int64_t i = 0; i < columns; ++i) store(to + (column - begin + i) * kRows, tile[i], Whole());
      }
    }
  }
  // These fill several vectors of columns at a time. -> the first column that is left
  template <int V, class Rows>
  static int64_t fill_transposed(const Rows& from, int64_t begin, int64_t end, float* to) {
    const int64_t columns = from.transposed_columns();
    int64_t column = begin;
    for (; columns > 0 && column + columns <= end; column += columns, to += columns * V * kLanes) {
      from.transposed(column, [to](int64_t i, const Vec& vec) { store(to + i * V * kLanes, vec, Whole()); });
    }
    return column;
  }
  template <int V, class Rows>
  static int64_t fill_by_sixteen(const Rows& from, int64_t begin, int64_t end, float* to) {
    int64_t column = begin;
    for (; column + kSixteen <= end; column += kSixteen) {
      Vec tiles[kSixteen / kLanes][kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        Sixteen values;
        from.sixteen(i, column, values);
        for (int64_t v = 0; v < kSixteen / kLanes; ++v) tiles[v][i] = values[v];
      }
      for (auto& tile : tiles) {
        transpose(tile);
        for (int64_t i = 0; i < kLanes; ++i, to += V * kLanes) store(to, tile[i], Whole());
      }
    }
    return column;
  }

  std::unique_ptr<float[], Free> floats_ = scratch<float>(kPanelColumns * kWideVectors * kLanes);  // column by column
  std::vector<float> spare_;  // results of repeated tokens
  const float* tail_x_[kMostTokens];
  float* tail_out_[kMostTokens];
};

// Neither rows nor columns are contiguous: each row is copied first. Correct for any strides, not meant to be fast.
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

// The product for any strides. A panel is given if there are many tokens.
template <class Reader>
inline void product(const Reader& weight, const Tokens& tokens, std::optional<Panel>& panel) {
  panel ? panel->product(weight, tokens) : product_by_rows(weight, tokens);
}
template <class Scalar>
void product(const Matrix<Scalar>& weight, const Tokens& tokens, std::optional<Panel>& panel) {
  if (weight.column == 1) return panel ? panel->product(weight, tokens) : product_by_rows(weight, tokens);
  if (weight.row == 1) return product_by_columns(weight, tokens);
  product_gathered(weight, tokens);
}

// weights/weight_rows.cpp compiles these for all files.
#define MOE_METAL_PRODUCTS(specifier, Scalar)                                                  \
  specifier template void product_by_rows(const Matrix<Scalar>& weight, const Tokens& tokens); \
  specifier template void product(const Matrix<Scalar>& weight, const Tokens& tokens, std::optional<Panel>& panel);
MOE_METAL_PRODUCTS(extern, float)
MOE_METAL_PRODUCTS(extern, at::Half)
MOE_METAL_PRODUCTS(extern, at::BFloat16)

}  // namespace moe_metal
