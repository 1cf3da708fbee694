// Rows of float32, float16 or bfloat16 as vectors of float, with tails, on every instruction set.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace moe_metal {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// A whole vector. A count known when compiling costs no branch and no mask.
using Whole = std::integral_constant<int64_t, kLanes>;

// body(offset, count) for each vector of a row of n: count is Whole, but for the tail.
template <class Body>
inline void for_each_vector(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole());
  if (i < n) body(i, n - i);
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
    // Not converted.store(to, kLanes): where that is half a vector it is a masked store, which stalls the next load
    // from the masked part.
    std::memcpy(to, &converted, kLanes * sizeof(Scalar));
  } else {
    converted.store(to, count);
  }
}

// The sum of the lanes, always in the same order.
inline float sum(const Vec& vec) {
  float lanes[kLanes];
  vec.store(lanes);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// body(Scalar()) for the dtype of an activation.
template <class Body>
inline void with_dtype(at::ScalarType dtype, Body&& body) {
  if (dtype == at::kFloat) return body(float());
  if (dtype == at::kHalf) return body(at::Half());
  return body(at::BFloat16());
}

// body(row, scratch) for every row, on all threads. One thread does one row, so the bits do not depend on their number.
// `work` is how many elements a row touches; `scratch` are that many floats of the thread's own.
template <class Body>
inline void for_each_row(int64_t rows, int64_t work, int64_t scratch, Body&& body) {
  constexpr int64_t kWorthAThread = 32768;
  at::parallel_for(0, rows, std::max<int64_t>(1, kWorthAThread / work), [&](int64_t begin, int64_t end) {
    std::vector<float> floats(scratch);
    for (int64_t row = begin; row < end; ++row) body(row, floats.data());
  });
}

}  // namespace moe_metal
