// Products of fragments: 8 x 8 matrices, which a simdgroup multiplies together. A lane holds two neighbours of a row of
// each fragment. The kernels of MLX and PyTorch rely on the same layout.
#pragma once

namespace moe_metal {

// The lane's first element of a fragment; the second one is its right neighbour.
struct FragmentElement {
  uint row, column;
};
inline FragmentElement fragment_element(uint lane) {
  FragmentElement element;
  element.row = lane / 2 % 4 + lane / 16 * 4;
  element.column = lane % 2 * 2 + lane / 8 % 2 * 4;
  return element;
}

// sum += left * right, for whole fragments.
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
