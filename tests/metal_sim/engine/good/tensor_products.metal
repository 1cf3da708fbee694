// Matrix products with Metal 4's tensor operations, in the style of PyTorch and of llama.cpp: out = a * b^T.
#include <metal_stdlib>
#if __METAL_VERSION__ >= 400 && __has_include(<MetalPerformancePrimitives/MetalPerformancePrimitives.h>)
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace metal;
using namespace mpp::tensor_ops;

constant constexpr int TILE_M = 32, TILE_N = 32, TILE_K = 32;

struct Sizes {
  int m, n, k;
};

// One operation reads all columns of both operands in place, and the sums are changed depending on their indices.
template <typename T>
kernel void product_of_rows(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                            device float* out [[buffer(2)]], constant Sizes& sizes [[buffer(3)]],
                            uint2 group [[threadgroup_position_in_grid]]) {
  const int row = group.y * TILE_M, column = group.x * TILE_N;
  const int rows = min(TILE_M, sizes.m - row), columns = min(TILE_N, sizes.n - column);
  constexpr auto descriptor = matmul2d_descriptor(TILE_M, TILE_N, static_cast<int>(dynamic_extent), false, true, false,
                                                  matmul2d_descriptor::mode::multiply);
  matmul2d<descriptor, execution_simdgroups<2>> product;
  using Operand = tensor<device T, dextents<int32_t, 2>, tensor_inline>;
  Operand left(const_cast<device T*>(a + row * sizes.k), dextents<int32_t, 2>(sizes.k, rows));
  Operand right(const_cast<device T*>(b + column * sizes.k), dextents<int32_t, 2>(sizes.k, columns),
                array<int32_t, 2>{1, sizes.k});
  auto sums = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
  product.run(left, right, sums);
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (!sums.is_valid_element(i)) continue;
    const auto place = sums.get_multidimensional_index(i);
    sums[i] += 100 * (row + place[1]) + column + place[0];
  }
  tensor<device float, dextents<int32_t, 2>, tensor_inline> target(
      out + row * sizes.n + column, dextents<int32_t, 2>(columns, rows), array<int32_t, 2>{1, sizes.n});
  sums.store(target);
}
template [[host_name("product_of_rows_half")]] kernel void product_of_rows<half>(device const half*, device const half*,
                                                                                 device float*, constant Sizes&, uint2);
template [[host_name("product_of_rows_bfloat")]] kernel void product_of_rows<bfloat>(device const bfloat*,
                                                                                     device const bfloat*,
                                                                                     device float*, constant Sizes&,
                                                                                     uint2);

// b is copied to threadgroup memory, a few columns at a time. Each simdgroup has different rows.
kernel void product_of_simdgroups(device half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                                  device float* out [[buffer(2)]], constant Sizes& sizes [[buffer(3)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half staged[TILE_N * TILE_K];
  constexpr auto descriptor = matmul2d_descriptor(16, TILE_N, TILE_K, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroup> product;
  using Left = tensor<device half, dextents<int32_t, 2>, tensor_inline>;
  using Right = tensor<threadgroup half, extents<int32_t, TILE_K, TILE_N>, tensor_inline>;
  auto sums = product.get_destination_cooperative_tensor<Left, Right, float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i)
    if (sums.is_valid_element(i)) sums[i] = 0;
  const int row = (group * 2 + simdgroup) * 16;
  for (int k = 0; k < sizes.k; k += TILE_K) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < TILE_N * TILE_K; i += 64) staged[i] = b[i / TILE_K * sizes.k + k + i % TILE_K];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Left left(a + row * sizes.k + k, dextents<int32_t, 2>(TILE_K, max(0, min(16, sizes.m - row))),
              array<int32_t, 2>{1, sizes.k});
    Right right(staged, extents<int32_t, TILE_K, TILE_N>());
    product.run(left, right, sums);
  }
  tensor<device float, dextents<int32_t, 2>, tensor_inline> target(
      out + row * TILE_N, dextents<int32_t, 2>(TILE_N, max(0, min(16, sizes.m - row))));
  sums.store(target);
}
#endif
