// Rows of a few thousand elements: loads and stores of four elements, sums over a row, and the norm of a row.
#pragma once
#include "common.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ loads and stores

template <typename T>
float4 load4_aligned(device const T* at) {
  const vec<T, 4> v = *reinterpret_cast<device const vec<T, 4>*>(at);
  return float4(float(v.x), float(v.y), float(v.z), float(v.w));
}

// Elements i to i + 3 of a row, as float. Past the end of the row they are 0.
template <bool aligned, typename T>
float4 load4(device const T* row, uint i, uint length) {
  if (aligned) return load4_aligned(row + i);
  float4 v = 0;
  for (uint n = 0; n < 4; ++n) {
    if (i + n < length) v[n] = float(row[i + n]);
  }
  return v;
}
template <typename T>
float4 load4(device const T* row, uint i, RowShape shape) {
  return shape.aligned ? load4<true>(row, i, shape.length) : load4<false>(row, i, shape.length);
}

// Rounds four results.
template <typename T>
void store4_aligned(device T* at, float4 v) {
  *reinterpret_cast<device vec<T, 4>*>(at) = vec<T, 4>(T(v.x), T(v.y), T(v.z), T(v.w));
}
template <typename T>
void store4(device T* row, uint i, float4 v, RowShape shape) {
  if (shape.aligned) return store4_aligned(row + i, v);
  for (uint n = 0; n < 4; ++n) {
    if (i + n < shape.length) row[i + n] = T(v[n]);
  }
}

// Loads of a parameter of either type, which must not be absent.
template <typename T>
float4 load4(device const T* row, uint i, RowShape shape, ParameterType type) {
  if (type == ParameterType::float32) return load4(reinterpret_cast<device const float*>(row), i, shape);
  return load4(row, i, shape);
}
template <typename T>
float load(device const T* values, ulong i, ParameterType type) {
  return type == ParameterType::float32 ? reinterpret_cast<device const float*>(values)[i] : float(values[i]);
}

// The scalar of norm_add and residual_norm: absent, one for all elements, or one for each.
template <typename T>
float4 load_scalar(device const T* scalar, uint i, ResidualNormParams params) {
  if (params.scalar == ParameterType::absent) return 1;
  if (params.scalar_stride == 0) return load(scalar, 0, params.scalar);
  return load4(scalar, i, params.row, params.scalar);
}

// The first element of a thread if several threadgroups divide a row; `index` is that of the threadgroup.
inline uint first_element(uint index, uint thread_index, uint simdgroups) {
  return 4 * (index * simdgroups * kSimdgroup + thread_index);
}

// ------------------------------------------------------------------------------------------ sums over a threadgroup

// The sum over all threads of a threadgroup of whole simdgroups, in a fixed order. Every thread gets the result.
inline float2 threadgroup_sum(float2 value, uint thread_index, uint simdgroups, threadgroup float2* partial) {
  const uint lane = thread_index % kSimdgroup;
  value = simd_sum(value);
  if (simdgroups == 1) return value;
  if (lane == 0) partial[thread_index / kSimdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = lane < simdgroups ? partial[lane] : float2(0);
  return simd_sum(value);
}

// ------------------------------------------------------------------------------------------ the norm of a row

// How many chunks of four elements a thread keeps in registers between the two passes over a row: with 1024 threads,
// rows of up to 16384 elements are read once. The rest of longer rows is computed again.
MOE_METAL_CONSTANT uint kKept = 4;

// Two passes of a threadgroup over a row: the sum of squares, then the results. Members of Row:
//   Value               four elements to be normed, or four of each of two rows
//   value(i)            computes elements i to i + 3
//   squares(value)      their sum of squares, for each of the two rows
//   write(i, value, inv_rms)
//   params.row, params.eps
template <class Row>
void walk_row(thread const Row& row, uint thread_index, uint simdgroups, threadgroup float2* partial) {
  const uint length = row.params.row.length, step = 4 * kSimdgroup * simdgroups;
  const uint first = 4 * thread_index, rest = first + kKept * step;
  typename Row::Value kept[kKept];
  float2 squares = 0;
#pragma clang loop unroll(full)  // otherwise `kept` may be in memory instead of registers
  for (uint n = 0; n < kKept; ++n) {
    const uint i = first + n * step;
    if (i < length) {
      kept[n] = row.value(i);
      squares += row.squares(kept[n]);
    }
  }
  for (uint i = rest; i < length; i += step) squares += row.squares(row.value(i));
  const float2 mean = threadgroup_sum(squares, thread_index, simdgroups, partial) / float(length);
  const float2 inv_rms = float2(rsqrt(mean.x + row.params.eps), rsqrt(mean.y + row.params.eps));
#pragma clang loop unroll(full)
  for (uint n = 0; n < kKept; ++n) {
    const uint i = first + n * step;
    if (i < length) row.write(i, kept[n], inv_rms);
  }
  for (uint i = rest; i < length; i += step) row.write(i, row.value(i), inv_rms);
}

// `aligned` is a constant in each branch, so that there is no branch at every load.
template <class Row>
void norm_row(Row row, uint thread_index, uint simdgroups, threadgroup float2* partial) {
  if (row.params.row.aligned) {
    row.params.row.aligned = 1;
    walk_row(row, thread_index, simdgroups, partial);
  } else {
    row.params.row.aligned = 0;
    walk_row(row, thread_index, simdgroups, partial);
  }
}

}  // namespace moe_metal
