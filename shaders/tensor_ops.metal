// Products of many rows with weights in any format on the matrix units of M5 and newer GPUs, with matmul2d of Apple's
// Metal Performance Primitives (macOS 26.3). The ops linear and experts use them if `tune` has found them correct and
// faster (csrc/mps/tensor_ops.h). Compiled as Metal 3, or without Apple's header, the library is empty.
//
//   output[i] = weight[expert of i] * x[i] + bias
//
// x [rows, columns] and output [rows, N] are contiguous and have type T, half or bfloat. Sums are float and rounded
// once. Packed weights are rounded to T before they are multiplied. With `tiles` (experts_slots.metal) the rows are
// sorted by expert; without, all rows are multiplied by the same weight.
//
// Grid: tiles of rows by tiles of kProductRows rows of weights, along x, in the order of experts_prefill.metal.
//
// matmul2d only reads tensors in memory, and its sums are stored to threadgroup memory: the layout of tensors in
// registers is not specified by Apple and has changed between compilers. Sums are set to zero and accumulated, since
// Apple's examples disagree about whether mode::multiply accumulates. relaxed_precision is off.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#include "rows.h"
#include "tiles.h"

#if __METAL_VERSION__ >= 400 && __has_include(<MetalPerformancePrimitives/MetalPerformancePrimitives.h>)
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// Without this macro the header declares nothing.
#if defined(__HAVE_TENSOR__)
#define MOE_METAL_TENSOR_OPS
#endif
#endif

#ifdef MOE_METAL_TENSOR_OPS
namespace moe_metal {

using mpp::tensor_ops::matmul2d;
using mpp::tensor_ops::matmul2d_descriptor;

// Two-dimensional tensors; the first dimension is along the columns and has stride 1. Operands must not be const.
template <typename T>
using DeviceTensor = tensor<device T, dextents<int32_t, 2>, tensor_inline>;
template <typename T>
using ThreadgroupTensor = tensor<threadgroup T, dextents<int32_t, 2>, tensor_inline>;

template <typename T>
DeviceTensor<T> device_tensor(device const T* first, uint columns, uint rows, uint stride) {
  return DeviceTensor<T>(const_cast<device T*>(first), dextents<int32_t, 2>(int(columns), int(rows)),
                         array<int32_t, 2>{1, int(stride)});
}

// The work of a threadgroup: rows [first, first + count) of x, and one tile of the expert's weight rows.
struct ProductTile {
  uint expert, first, count, weight_tile;
};

template <uint TileRows>
ProductTile product_tile(device const int4* tiles, uint group, constant ProductParams& params) {
  const uint weight_tiles = (params.N + kProductRows - 1) / kProductRows, together = params.tiles_per_band;
  const uint at = group / (together * weight_tiles) * together + group % together;
  ProductTile tile = {};
  tile.weight_tile = group / together % weight_tiles;
  tile.first = at * TileRows;
  if (params.tiles == 0) {
    tile.count = tile.first < params.rows ? min(TileRows, params.rows - tile.first) : 0;
  } else if (at < params.tiles) {
    const int4 entry = tiles[at];
    tile.expert = entry.x;
    tile.first = entry.y;
    tile.count = entry.z;
  }
  return tile;
}

// ------------------------------------------------------------------------------------------ weights

// Dense and packed weights as operands of matmul2d:
//   Data, Operand   the element type of their buffer; the type of the operand
//   columns         of one matmul2d
//   multiply        sums += x * weights^T, for rows [first, first + kProductRows) of the weights

// Dense rows are read where they are, by a single matmul2d over all columns.
template <typename T>
struct DenseOperand {
  using Data = T;
  using Operand = DeviceTensor<T>;
  enum : int { columns = int(dynamic_extent) };
  enum : uint { bytes = 0 };

  template <uint, typename Multiply, typename Sums>
  static void multiply(thread Multiply& product, thread Sums& sums, threadgroup uint4*, device const T* x, uint count,
                       Weights<T> weights, uint first, constant ProductParams& params, uint) {
    DeviceTensor<T> left = device_tensor(x, params.columns, count, params.columns);
    DeviceTensor<T> right = device_tensor(weights.data + row_offset(params.weight, first), params.columns,
                                          min(kProductRows, params.N - first), uint(params.weight.row));
    product.run(left, right, sums);
  }
};

// Packed rows are unpacked to threadgroup memory, kProductColumns columns of them for each matmul2d. `Reader` is a
// PackedTile.
template <typename T, typename Reader>
struct PackedOperand {
  using Data = uchar;
  using Operand = ThreadgroupTensor<T>;
  enum : int { columns = kProductColumns };
  enum : uint {
    bytes = kProductRows * kProductColumns * sizeof(T),
    chunks = kProductColumns / kChunk  // of a row; the threads divide them
  };

  template <uint Threads, typename Multiply, typename Sums>
  static void multiply(thread Multiply& product, thread Sums& sums, threadgroup uint4* memory, device const T* x,
                       uint count, Weights<uchar> weights, uint first, constant ProductParams& params,
                       uint thread_index) {
    constexpr uint loads = kProductRows * chunks / Threads;
    threadgroup T* unpacked = reinterpret_cast<threadgroup T*>(memory);
    ThreadgroupTensor<T> right(unpacked, dextents<int32_t, 2>(int(kProductColumns), int(kProductRows)),
                               array<int32_t, 2>{1, int(kProductColumns)});
    for (uint column = 0; column < params.columns; column += kProductColumns) {
      typename Reader::Chunk loaded[loads];
#pragma unroll
      for (uint t = 0; t < loads; ++t) {
        const uint chunk = thread_index + t * Threads, row = min(first + chunk / chunks, params.N - 1);
        Reader::template load<true>(Reader::row(weights, params.weight, row), params.weight,
                                    column + chunk % chunks * kChunk, params.columns, loaded[t]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // until the previous matmul2d has read the memory
#pragma unroll
      for (uint t = 0; t < loads; ++t) unpack(loaded[t], unpacked + (thread_index + t * Threads) * kChunk);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      DeviceTensor<T> left = device_tensor(x + column, kProductColumns, count, params.columns);
      product.run(left, right, sums);
    }
  }

  static void unpack(thread const typename Reader::Chunk& chunk, threadgroup T* to) {
#pragma unroll
    for (uint i = 0; i < kChunk; i += 8) {
      Vectors<2> values;
      Reader::template eight<true>(chunk, i, values);
#pragma unroll
      for (uint n = 0; n < 2; ++n) {
        const float4 v = values.at[n] * float(Reader::factor);
        reinterpret_cast<threadgroup vec<T, 4>*>(to + i)[n] = vec<T, 4>(T(v.x), T(v.y), T(v.z), T(v.w));
      }
    }
  }
};

// ------------------------------------------------------------------------------------------ the product

template <typename T, typename Weight, uint TileRows>
[[kernel]] void tensor_products(device const T* x [[buffer(0)]], device const int4* tiles [[buffer(1)]],
                                device const typename Weight::Data* weight [[buffer(2)]],
                                device const uchar* scale [[buffer(3)]], device const uchar* offset [[buffer(4)]],
                                device const T* bias [[buffer(5)]], device T* output [[buffer(6)]],
                                constant ProductParams& params [[buffer(7)]],
                                uint group [[threadgroup_position_in_grid]],
                                uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint sums_bytes = TileRows * kProductRows * sizeof(float), threads = 32 * product_simdgroups(TileRows);
  threadgroup uint4 memory[(sums_bytes > uint(Weight::bytes) ? sums_bytes : uint(Weight::bytes)) / sizeof(uint4)];
  const ProductTile tile = product_tile<TileRows>(tiles, group, params);
  if (tile.count == 0) return;
  constexpr auto descriptor = matmul2d_descriptor(TileRows, kProductRows, Weight::columns, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<product_simdgroups(TileRows)>> product;
  auto sums = product.template get_destination_cooperative_tensor<DeviceTensor<T>, typename Weight::Operand, float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) sums[i] = 0;
  }
  const uint first = tile.weight_tile * kProductRows;
  Weight::template multiply<threads>(product, sums, memory, x + ulong(tile.first) * params.columns, tile.count,
                                     of_expert(weight, scale, offset, tile.expert, params.weight), first, params,
                                     thread_index);
  threadgroup float* results = reinterpret_cast<threadgroup float*>(memory);
  ThreadgroupTensor<float> stored(results, dextents<int32_t, 2>(int(kProductRows), int(TileRows)),
                                  array<int32_t, 2>{1, int(kProductRows)});
  threadgroup_barrier(mem_flags::mem_threadgroup);  // until the last matmul2d has read the memory
  sums.store(stored);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < tile.count * kProductRows; i += threads) {
    const uint n = first + i % kProductRows;
    if (n >= params.N) continue;
    const float added = params.bias == ParameterType::absent ? 0 : load(bias, n, params.bias);
    output[ulong(tile.first + i / kProductRows) * params.N + n] = T(results[i] + added);
  }
}

}  // namespace moe_metal

// clang-format off
#ifndef MOE_METAL_FORMAT
#define operand(dtype) moe_metal::DenseOperand<dtype>
#else
#define operand(dtype) moe_metal::PackedOperand<dtype, wide_tile(dtype)>
#endif
#define instantiate_products(dtype, rows)                                    \
  instantiate_kernel("tensor_products" #rows weights_suffix "_" #dtype, \
                     moe_metal::tensor_products<dtype, operand(dtype), rows>)
#if in_part(tiles16)
if_half(instantiate_products(half, 16))
if_bfloat(instantiate_products(bfloat, 16))
#endif
#if in_part(tiles32)
if_half(instantiate_products(half, 32))
if_bfloat(instantiate_products(bfloat, 32))
#endif
#if in_part(tiles64)
if_half(instantiate_products(half, 64))
if_bfloat(instantiate_products(bfloat, 64))
#endif
#endif
