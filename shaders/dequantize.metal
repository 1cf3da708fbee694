// The op dequantize: output = the values of a weight.
//
// weight in any format, output [matrices, rows, columns].
// Grid: one thread for kNarrowColumns columns of a row, along x.
#include <metal_stdlib>
using namespace metal;

#include "rows.h"
#include "weights.h"

namespace moe_metal {

template <typename T>
[[kernel]] void dequantize(device const uchar* data [[buffer(0)]], device const uchar* scale [[buffer(1)]],
                           device const uchar* offset [[buffer(2)]], device T* output [[buffer(3)]],
                           constant DequantizeParams& params [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong chunk = ulong(group) * simdgroups * kSimdgroup + thread_index;
  if (chunk >= params.all_chunks) return;
  const ulong row = chunk / params.chunks;
  const uint r = row % params.rows, column = chunk % params.chunks * kNarrowColumns;
  const Weights<uchar> weights = of_expert(data, scale, offset, row / params.rows, params.weight);
  device T* to = output + row * params.columns;
  Vectors<kNarrowColumns / 4> values;
#ifndef MOE_METAL_FORMAT
  for (uint n = 0; n < kNarrowColumns; ++n) {
    const ulong at = r * params.weight.row + (column + n) * params.weight.column;
    values.at[n / 4][n % 4] = column + n < params.columns ? load_number(weights.data + at, params.dense_type) : 0;
  }
#else
  using Codes = weights_codes(kNarrowColumns);
  LoadedChunk<Codes> codes;
  load_chunk(packed_row<Codes>(weights, params.weight, r), params.weight, column, params.columns - column,
             params.weight.layout == WeightLayout::rows_wide, codes);
  for (uint n = 0; n < kNarrowColumns; n += 8) {
    Vectors<2> eight;
    chunk_values<Codes, false>(codes, n, eight);
    values.at[n / 4] = eight.at[0];
    values.at[n / 4 + 1] = eight.at[1];
  }
#endif
  const bool aligned = params.columns % kVectorWidth == 0;
  for (uint n = 0; n < kNarrowColumns; n += kVectorWidth) {
    if (aligned && column + n < params.columns) store4_aligned(to + column + n, values.at[n / 4]);
    for (uint m = n; !aligned && m < n + kVectorWidth && column + m < params.columns; ++m)
      to[column + m] = T(values.at[n / 4][m % 4]);
  }
}

}  // namespace moe_metal

// clang-format off
if_float(instantiate_kernel("dequantize" weights_suffix "_float", moe_metal::dequantize<float>))
if_half(instantiate_kernel("dequantize" weights_suffix "_half", moe_metal::dequantize<half>))
if_bfloat(instantiate_kernel("dequantize" weights_suffix "_bfloat", moe_metal::dequantize<bfloat>))
