// The rows of a weight in a work item of experts, linear or dequantize, and their biases.
#pragma once
#include <algorithm>

#include "cpu/vector/rows.h"

namespace moe_metal {

// Work items have this many rows of a weight, or a few times as many. 32 rows are 48 to 256 KB of weights in common
// models.
constexpr int64_t kRows = 32;

// The rows of a work item: up to `most` times kRows, so that each thread gets at least `items` items out of all rows.
// It is called before the parallel loop: on a new OpenMP thread, the first call of at::get_num_threads() may return 1.
inline int64_t rows_for_threads(int64_t rows, int64_t items, int64_t most) {
  return kRows * std::clamp<int64_t>(rows / (kRows * items * at::get_num_threads()), 1, most);
}

// How many times kRows rows of a weight, as bfloat16, half of an L2 cache of 1 MB holds.
inline int64_t items_in_half_of_l2(int64_t columns) {
  return (512 << 10) / (kRows * 2 * std::max<int64_t>(columns, 1));
}

// to[i] = bias[first + i * step], or 0 without a bias.
inline void read_bias(const Tensor& bias, int64_t first, int64_t step, int64_t count, float* to) {
  std::fill_n(to, kRows, 0.0f);
  if (!bias.defined()) return;
  with_dtype(bias.scalar_type(), [&](auto scalar) {
    const auto* from = static_cast<const decltype(scalar)*>(bias.const_data_ptr()) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i * step]);
  });
}

}  // namespace moe_metal
