// The chunk types of dots.h for dense weights.
#pragma once
#include "dots_rows.h"

namespace moe_metal {

// sums += scale * (this lane's chunks of the rows, from `column` on) * vector
template <typename Chunk, typename V>
void add_dense(thread DotRows<long>& rows, float scale, device const V* vector, Weights<typename Chunk::Data> weights,
               constant WeightParams& params, uint length, uint column) {
  Vectors<Chunk::vectors> v, w[kDotRows];
  Chunk::load(vector, column, length, 1, v);
  for (uint r = 0; r < kDotRows; ++r) {
    Chunk::load(weights.data + (r % 2 ? rows.gap : 0) + rows.data.at[r], column, length, params.column, w[r]);
  }
  for (uint r = 0; r < kDotRows; ++r) {
    float sum = 0;
    for (uint n = 0; n < Chunk::vectors; ++n) sum += dot(w[r].at[n], v.at[n]);
    rows.sum[r] += scale * sum;
  }
}

template <typename T>
struct WideChunk {
  using Data = T;
  using At = long;
  enum : uint {
    lanes = 32,
    vectors = Wide<T>::vectors,
    apart = Wide<T>::elements,
    step = 32 * apart,
    scale_rows = 1,
    per_lane = 0
  };
  template <typename V>
  static void load(device const V* row, uint column, uint, long, thread Vectors<vectors>& values) {
    load_wide(row + column, values);
  }
  template <bool reordered, typename V>
  static void add(thread DotRows<At>& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<WideChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
  // The same for several vectors, with one load of the weights. The order of each sum is the same as for one vector.
  template <bool reordered, uint N, typename V>
  static void add_several(thread const DotRows<At>& rows, thread const SeveralVectors<V, N>& several,
                          Weights<T> weights, constant WeightParams&, uint column, thread SeveralSums<N>& sums) {
    Vectors<vectors> w[kDotRows];
    for (uint r = 0; r < kDotRows; ++r) {
      load_wide(weights.data + (r % 2 ? rows.gap : 0) + rows.data.at[r] + column, w[r]);
    }
#pragma unroll
    for (uint t = 0; t < N; ++t) {
      Vectors<vectors> v;
      load_wide(several.at(t) + column, v);
      for (uint r = 0; r < kDotRows; ++r) {
        float sum = 0;
        for (uint n = 0; n < vectors; ++n) sum += dot(w[r].at[n], v.at[n]);
        sums.of[t].at[r] += sum;
      }
    }
  }
};
template <typename T>
struct AnyChunk {
  using Data = T;
  using At = long;
  enum : uint { lanes = 32, vectors = 1, apart = 1, step = 128, scale_rows = 1, per_lane = 0 };
  template <typename V>
  static void load(device const V* row, uint column, uint length, long stride, thread Vectors<vectors>& values) {
    for (uint n = 0; n < 4; ++n) {
      const uint c = column + 32 * n;
      values.at[0][n] = c < length ? float(row[c * stride]) : 0;
    }
  }
  template <bool reordered, typename V>
  static void add(thread DotRows<At>& rows, float scale, device const V* vector, Weights<T> weights,
                  constant WeightParams& params, uint length, uint column) {
    add_dense<AnyChunk<T>>(rows, scale, vector, weights, params, length, column);
  }
};

}  // namespace moe_metal
