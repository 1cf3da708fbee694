// Rows of float32, float16 or bfloat16 as vectors of float, with tails, on every instruction set.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "cpu/vector/processor.h"

namespace moe_metal {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
// 16 columns, which readers of packed weights unpack together.
constexpr int64_t kSixteen = 16;
using Sixteen = Vec[kSixteen / kLanes];

// The count of a whole vector. Since it is a compile-time constant, it needs no branch and no mask.
using Whole = std::integral_constant<int64_t, kLanes>;

// Calls body(offset, count) for each vector of a row of n elements. `count` is Whole except for the tail.
template <class Body>
inline void for_each_vector(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole());
  if (i < n) body(i, n - i);
}

// Calls body(integral_constant 0) ... body(integral_constant N-1), so that arrays of vectors stay in registers.
template <int N, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, N>());
}

template <class Scalar, class Count>
inline Vec load(const Scalar* from, Count count) {
  if constexpr (std::is_same_v<Scalar, float>) {
    return Vec::loadu(from, count);
  } else if constexpr (std::is_same_v<Count, Whole>) {
    Vec vec;
    at::vec::load_to_float(from, vec);
    return vec;
  } else {
    return at::vec::convert<float>(at::vec::Vectorized<Scalar>::loadu(from, count));
  }
}

template <class Scalar, class Count>
inline void store(Scalar* to, const Vec& vec, Count count) {
  const auto converted = at::vec::convert<Scalar>(vec);
  if constexpr (std::is_same_v<Count, Whole>) {
    // Not converted.store(to, kLanes): for half a vector that is a masked store, which stalls the next load from the
    // masked part.
    std::memcpy(to, &converted, kLanes * sizeof(Scalar));
  } else {
    converted.store(to, count);
  }
}

// A non-temporal store, for outputs that are larger than the caches: a plain store would first load the cache line that
// it overwrites. `to` must be aligned to the vector. See past_caches() in vector/rows.h.
template <class Scalar>
inline void store_past_caches(Scalar* to, const Vec& vec) {
#ifdef MOE_METAL_HAS_AVX2
  const auto converted = at::vec::convert<Scalar>(vec);
  constexpr int64_t kBytes = kLanes * sizeof(Scalar), kStep = std::min<int64_t>(kBytes, 32);
  alignas(64) char bytes[kBytes];
  std::memcpy(bytes, &converted, kBytes);
  for (int64_t i = 0; i < kBytes; i += kStep) {
    auto* target = reinterpret_cast<char*>(to) + i;
    if constexpr (kStep == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target), _mm256_load_si256(reinterpret_cast<__m256i*>(bytes + i)));
    } else {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target), _mm_load_si128(reinterpret_cast<__m128i*>(bytes + i)));
    }
  }
#else
  store(to, vec, Whole());
#endif
}

// Either of the two. Tails always use a plain store.
template <class Scalar, class Count>
inline void store(Scalar* to, const Vec& vec, Count count, bool past_caches) {
  if (std::is_same_v<Count, Whole> && past_caches) return store_past_caches(to, vec);
  store(to, vec, count);
}

#ifdef MOE_METAL_HAS_AVX512
// Transposes 16 x 16 words of 32 bits.
inline void transpose(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = 0; i < 4; ++i) {
      t[half + i] = _mm512_shuffle_i32x4(m[half + i], m[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(m[half + i], m[half + i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    m[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    m[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#endif

// PyTorch's own transpose for AVX-512 takes four times as long, since it keeps its vectors in memory.
inline void transpose(Vec (&rows)[kLanes]) {
#ifdef MOE_METAL_HAS_AVX512
  __m512i words[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) words[i] = _mm512_castps_si512(rows[i]);
  transpose(words);
  for (int64_t i = 0; i < kLanes; ++i) rows[i] = _mm512_castsi512_ps(words[i]);
#else
  alignas(64) float from[kLanes][kLanes], to[kLanes][kLanes];
  for (int64_t i = 0; i < kLanes; ++i) store(from[i], rows[i], Whole());
  at::vec::transpose_mxn<float, kLanes, kLanes>(from[0], kLanes, to[0], kLanes);
  for (int64_t i = 0; i < kLanes; ++i) rows[i] = load(to[i], Whole());
#endif
}

// 2^x with a relative error of about 2e-7: 2^floor(x) times a polynomial of the rest. -inf gives 0; NaN stays NaN.
inline Vec exp2(const Vec& x) {
#ifdef MOE_METAL_HAS_AVX512
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 power = _mm512_set1_ps(0.00187757669f);
  for (float coefficient : {0.00898933969f, 0.0558263175f, 0.240153611f, 0.693153083f, 0.99999994f}) {
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(coefficient));
  }
  return _mm512_scalef_ps(power, x);  // scalef uses floor(x)
#else
  return x.exp2();
#endif
}

// The sum of the lanes, in a fixed order.
inline float sum(const Vec& vec) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, vec);
}

// Calls body(Scalar()) for the dtype of an activation.
template <class Body>
inline void with_dtype(at::ScalarType dtype, Body&& body) {
  if (dtype == at::kFloat) return body(float());
  if (dtype == at::kHalf) return body(at::Half());
  return body(at::BFloat16());
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Scratch memory of one thread, aligned to cache lines: products take a fifth longer if vectors straddle lines.
template <class Scalar>
inline std::unique_ptr<Scalar[], Free> scratch(int64_t count) {
  const size_t bytes = at::divup(count * static_cast<int64_t>(sizeof(Scalar)), kLine) * kLine;
  void* memory = std::aligned_alloc(kLine, std::max<size_t>(bytes, kLine));
  if (!memory) throw std::bad_alloc();
  return std::unique_ptr<Scalar[], Free>(static_cast<Scalar*>(memory));
}

// Element (r, c) of a matrix is data[r * row + c * column].
template <class Scalar>
struct Matrix {
  const Scalar* data;
  int64_t row, column;
  int64_t rows, columns;

  // The interface that products use to read contiguous rows, here those from `first` on; weights/weight_rows.h has the
  // other readers. load() returns the vector of row `r` at a column.
  struct RowBlock {
    const Scalar* data;
    int64_t row;
    template <class Count>
    [[gnu::always_inline]] Vec load(int64_t r, int64_t column, Count count) const {
      return moe_metal::load(data + r * row + column, count);
    }
    // Rows of 2 bytes per weight are too short for the hardware prefetcher: this makes them 10 % faster, but floats
    // slower.
    [[gnu::always_inline]] void prefetch(int64_t r, int64_t column) const {
      if constexpr (sizeof(Scalar) == 2) __builtin_prefetch(data + r * row + column, 0, 2);
    }
    // Calls use(i, vec) for each i below transposed_columns(): vec has the numbers of kLanes rows at column + i. Pairs
    // of columns are transposed before they are converted, which takes half as many shuffles.
    static int64_t transposed_columns() { return 2 * kLanes; }
    template <class Use>
    void transposed(int64_t column, Use&& use) const
      requires(std::is_same_v<Scalar, at::BFloat16>)
    {
      const at::vec::Vectorized<int32_t> half(16);
      const Vec upper_half(std::bit_cast<float>(0xffff0000));
      Vec pairs[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) pairs[i] = Vec::loadu(data + i * row + column);
      transpose(pairs);
      for (int64_t i = 0; i < kLanes; ++i) {
        use(2 * i, at::vec::cast<float>(at::vec::cast<int32_t>(pairs[i]) << half));
        use(2 * i + 1, pairs[i] & upper_half);
      }
    }
  };
  RowBlock row_block(int64_t first) const { return {data + first * row, row}; }
  // The address of an element, the row stride in bytes, and the bytes of so many columns.
  const void* address(int64_t r, int64_t column) const { return data + r * row + column; }
  int64_t row_bytes() const { return row * static_cast<int64_t>(sizeof(Scalar)); }
  static int64_t bytes(int64_t columns) { return columns * static_cast<int64_t>(sizeof(Scalar)); }
};

}  // namespace moe_metal
