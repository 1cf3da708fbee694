// The host side of shaders/rows.h: the shape of rows, the threads per row, and the params of ops that norm rows.
#pragma once
#include <algorithm>

#include "contract/combine.h"
#include "mps/launch.h"
#include "mps/tuning.h"

namespace moe_metal {

// `count` rows of `length` elements in contiguous tensors. Loads of four elements need rows that all start at a
// multiple of four.
inline RowShape row_shape(int64_t count, int64_t length, std::initializer_list<const Tensor*> tensors) {
  bool aligned = length % kVectorWidth == 0;
  for (const Tensor* tensor : tensors) aligned &= !tensor->defined() || tensor->storage_offset() % kVectorWidth == 0;
  return {.count = to_uint(count), .length = to_uint(length), .aligned = aligned};
}

// The threads of a row, a multiple of a simdgroup. With few rows, a thread has one chunk of four elements, since only
// latency matters. With many rows it has four chunks: as many loads are in flight, with fewer threads to sum over.
// There are 1024 threads only if fewer threads, with four chunks each, cannot hold the row in registers.
inline int threads_for_row(int64_t rows, int64_t length) {
  const int64_t of_thread = rows <= 32 ? kVectorWidth : 4 * kVectorWidth;
  const int64_t most = length <= 4 * kVectorWidth * tuning().row_threads ? tuning().row_threads : 1024;
  return static_cast<int>(std::min<int64_t>(ceil_div(ceil_div(length, of_thread), kSimdgroup) * kSimdgroup, most));
}

// A norm needs the sum over its whole row, so a row is one threadgroup.
inline Grid grid_of_rows(int64_t rows, int64_t length) { return {rows, 1, threads_for_row(rows, length)}; }

// A kernel over rows, compiled for up to 512 threads, with twice the registers per thread, and for up to 1024.
class RowKernels {
 public:
  explicit RowKernels(const char* shader) : half_(shader, 512), whole_(shader, 1024) {}
  Kernel& operator()(at::ScalarType dtype, const Grid& grid) { return (grid.threads <= 512 ? half_ : whole_)[dtype]; }

 private:
  Kernels half_, whole_;
};

constexpr int kElementThreads = 256;

// Without a norm, several threadgroups divide a row. With few rows they have one simdgroup each, to use the whole GPU.
inline Grid grid_of_elements(int64_t rows, int64_t length) {
  const int64_t chunks = ceil_div(length, kVectorWidth);
  const int64_t threads =
      std::min<int64_t>(ceil_div(chunks, kSimdgroup) * kSimdgroup, rows <= 32 ? kSimdgroup : kElementThreads);
  return {rows, ceil_div(chunks, threads), static_cast<int>(threads)};
}

inline WeightedSumParams weighted_sum_params(const WeightedSum& call) {
  return {
      .row = row_shape(call.T, call.H,
                       {&call.slots, &call.shared, &call.residual, &call.norm_weight, &call.residual_norm_weight}),
      .top_k = to_uint(call.K),
      .weights = parameter_type(call.weights),
      .shared_gate = parameter_type(call.shared_gate),
      .norm_weight = parameter_type(call.norm_weight),
      .residual_norm_weight = parameter_type(call.residual_norm_weight),
      .has_shared = call.shared.defined(),
      .has_residual = call.residual.defined(),
      .eps = call.eps,
  };
}

inline ResidualNormParams residual_norm_params(const Norm& call) {
  const bool one_scalar = call.scalar.defined() && call.scalar.size(0) == 1;
  const Tensor none;
  RowShape row =
      row_shape(call.T, call.H, {&call.residual, &call.input, &call.weight, one_scalar ? &none : &call.scalar});
  row.aligned = row.aligned && call.input_row % kVectorWidth == 0;
  return {
      .row = row,
      .input_row = to_uint(call.input_row),
      .has_residual = call.residual.defined(),
      .weight = parameter_type(call.weight),
      .scalar = parameter_type(call.scalar),
      .scalar_stride = one_scalar ? 0u : 1u,
      .eps = call.eps,
  };
}

}  // namespace moe_metal
