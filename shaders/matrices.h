// Products of 8 x 8 matrices, which a simdgroup computes together. A lane holds two neighbours of a row of each matrix.
// The kernels of MLX and PyTorch rely on the same layout.
#pragma once

namespace moe_metal {

struct MatrixPlace {
  uint row, column;  // of the lane's first element; the second one is its right neighbour
};
inline MatrixPlace matrix_place(uint lane) {
  MatrixPlace place;
  place.row = lane / 2 % 4 + lane / 16 * 4;
  place.column = lane % 2 * 2 + lane / 8 % 2 * 4;
  return place;
}

// sum += left * right, for whole matrices.
inline void multiply_add(thread float2& sum, float2 left_pair, float2 right_pair) {
  simdgroup_float8x8 left, right, product;
  for (uint e = 0; e < 2; ++e) {
    left.thread_elements()[e] = left_pair[e];
    right.thread_elements()[e] = right_pair[e];
    product.thread_elements()[e] = sum[e];
  }
  simdgroup_multiply_accumulate(product, left, right, product);
  sum = float2(product.thread_elements()[0], product.thread_elements()[1]);
}

}  // namespace moe_metal
