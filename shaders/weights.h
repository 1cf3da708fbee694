// Weights of any format: where they are in memory, and their values. `dequantize` in reference.py defines the formats.
//
// A library supports one format: MOE_METAL_FORMAT is its `library` in csrc/formats.h; it is not defined for dense
// weights. `weights_codes` is the reader of this name in the namespace `formats`; formats/codes.h describes readers.
// Packed rows are read in chunks of kPackedColumns or of kNarrowColumns.
//
// Properties of Apple's GPUs, from published measurements: conversions from integer to float and shifts have a quarter
// of the rate of masks and additions. So codes are converted by reinterpreting their bits, two at once as half2 if
// their width allows. Converting half to float is free as part of another instruction. Codes rely on subnormal halves
// not being flushed, as MLX's readers of e2m1 and e4m3 do on every Apple GPU. Registers are scarce: a lane holds the
// words of four rows (16 for 4 bits, 32 for 8) and 32 elements of x.
#pragma once
#include "formats/affine.h"
#include "formats/fp4.h"
#include "formats/fp8.h"
#include "formats/ggml_32.h"
#include "formats/ggml_k.h"

namespace moe_metal {

// The memory of a weight. Dense data have type T; packed data and scales are bytes.
template <typename D>
struct Weights {
  device const D* data;
  device const uchar* scale;
  device const uchar* offset;
};

template <typename D>
Weights<D> of_expert(device const D* data, device const uchar* scale, device const uchar* offset, long expert,
                     constant WeightParams& params) {
  Weights<D> weights;
  weights.data = data + expert * params.expert;
  weights.scale = scale + expert * params.scale.expert;
  weights.offset = offset + expert * params.offset.expert;
  return weights;
}

// The offset of a row.
inline long row_offset(constant WeightParams& params, uint number) {
  return long(number) * params.row + (number < params.gap_at ? 0 : params.gap);
}

// ------------------------------------------------------------------------------------------ 16 bytes at once

// 16 bytes hold four floats, or eight of half or bfloat: one or two vectors of four.
template <typename T>
struct Wide {
  enum : uint { vectors = sizeof(T) == 4 ? 1 : 2, elements = 4 * vectors };
  using Values = Vectors<vectors>;
};

// Converts eight loaded numbers to float.
template <typename T>
void to_floats(thread const uint4* bits, thread Vectors<2>& values) {
  const vec<T, 4> low = as_type<vec<T, 4>>(bits[0].xy), high = as_type<vec<T, 4>>(bits[0].zw);
  values.at[0] = float4(float(low.x), float(low.y), float(low.z), float(low.w));
  values.at[1] = float4(float(high.x), float(high.y), float(high.z), float(high.w));
}
template <>
inline void to_floats<float>(thread const uint4* bits, thread Vectors<2>& values) {
  values.at[0] = as_type<float4>(bits[0]);
  values.at[1] = as_type<float4>(bits[1]);
}
// One load, not two of 8 bytes.
template <typename T>
void load_wide(device const T* source, thread Vectors<2>& values) {
  const uint4 bits = *reinterpret_cast<device const uint4*>(source);
  to_floats<T>(&bits, values);
}
inline void load_wide(device const float* source, thread Vectors<1>& values) {
  values.at[0] = *reinterpret_cast<device const float4*>(source);
}
// Eight floats, to be multiplied by eight elements of half or bfloat, or by eight codes.
inline void load_wide(device const float* source, thread Vectors<2>& values) {
  values.at[0] = reinterpret_cast<device const float4*>(source)[0];
  values.at[1] = reinterpret_cast<device const float4*>(source)[1];
}

// ------------------------------------------------------------------------------------------ numbers of any type

// 2^(byte - 127); 255 is NaN. The smallest is subnormal: a GPU that flushes subnormals makes it 0.
inline float e8m0(uchar byte) {
  return as_type<float>(byte == 255 ? 0x7fc00000u : byte ? uint(byte) << 23 : 0x00400000u);
}

// e4m3 is 2^8 times the half with the same bits. The largest magnitude is NaN.
inline float e4m3(uchar byte) {
  const uint bits = uint(byte) << 7, half_bits = bits + (bits & 0x4000);  // moves the sign one bit up
  return (bits & 0x3f80) == 0x3f80 ? NAN : float(as_type<half>(ushort(half_bits))) * 256;
}

inline float load_number(device const uchar* at, NumberType type) {
  if (type == NumberType::e8m0) return e8m0(*at);
  if (type == NumberType::float32) return *reinterpret_cast<device const float*>(at);
  if (type == NumberType::float16) return float(*reinterpret_cast<device const half*>(at));
  return float(*reinterpret_cast<device const bfloat*>(at));
}

template <typename At, uint N>
struct Offsets {
  At at[N];
};
// Loads the scales or offsets of one group of N rows. The type is checked once, so that the loads overlap.
template <typename Codes, typename At, uint N>
void load_scales(device const uchar* from, thread const Offsets<At, N>& rows, At group, NumberType type,
                 thread Floats<N>& to) {
  if (Codes::e4m3_scale) {
    for (uint r = 0; r < N; ++r) to.at[r] = e4m3(from[rows.at[r] + group]);
  } else if (Codes::e8m0_scale) {
    for (uint r = 0; r < N; ++r) to.at[r] = e8m0(from[rows.at[r] + group]);
  } else if (type == NumberType::float32) {
    for (uint r = 0; r < N; ++r) to.at[r] = *reinterpret_cast<device const float*>(from + (rows.at[r] + group));
  } else if (type == NumberType::float16) {
    for (uint r = 0; r < N; ++r) to.at[r] = float(*reinterpret_cast<device const half*>(from + (rows.at[r] + group)));
  } else {
    for (uint r = 0; r < N; ++r) to.at[r] = float(*reinterpret_cast<device const bfloat*>(from + (rows.at[r] + group)));
  }
}

// ------------------------------------------------------------------------------------------ values

// Pointers to a row, its scales and its offsets.
struct PackedRow {
  device const uchar* data;
  device const uchar* scale;
  device const uchar* offset;
};
template <typename Codes>
PackedRow packed_row(Weights<uchar> weights, constant WeightParams& params, uint row) {
  PackedRow found;
  found.data = weights.data + row_offset(params, row);
  found.scale = weights.scale + row / Codes::scale_rows * params.scale.row;
  found.offset = weights.offset + row / Codes::scale_rows * params.offset.row;
  return found;
}

// The factor of all scales of a matrix.
inline float load_factor(device const uchar* offset, constant WeightParams& params) {
  return params.has_factor ? *reinterpret_cast<device const float*>(offset) : 1;
}

// kNarrowColumns columns of a row, all in one group. Values from `count` on are 0.
template <typename Codes>
struct LoadedChunk {
  Words<Codes::words> words;
  float scale, offset;
  uint count;
};
template <typename Codes>
void load_chunk(PackedRow row, constant WeightParams& params, uint column, uint count, bool aligned,
                thread LoadedChunk<Codes>& chunk) {
  using Layout = typename Codes::Layout;
  chunk.count = count;
  chunk.scale = 0;
  chunk.offset = 0;
  if (count == 0) return;
  const ChunkPosition at = Layout::position(column);
  Layout::load(row.data, at, count, aligned, chunk.words);
  if (Codes::own_scales) {
    Floats<1> scale, offset;
    Layout::numbers(chunk.words, at, scale, offset);
    chunk.scale = scale.at[0];
    if (Codes::has_offset) chunk.offset = offset.at[0];
    return;
  }
  const long group = column >> params.group_shift;
  device const uchar* scale = row.scale + group * params.scale.group;
  if (Codes::e4m3_scale) {
    chunk.scale = load_factor(row.offset, params) * e4m3(*scale);
  } else {
    chunk.scale = load_number(scale, params.scale_type);
  }
  if (Codes::has_offset) chunk.offset = load_number(row.offset + group * params.offset.group, params.scale_type);
}
// If a code is NaN, makes the whole chunk NaN: the product of its row with any vector is NaN anyway.
template <typename Codes>
void spread_nan(thread LoadedChunk<Codes>& chunk) {
  uint nan = 0;
#pragma unroll
  for (uint n = 0; n < Codes::words; ++n) nan |= Codes::nan_bits(chunk.words.at[n]);
  chunk.scale = nan ? NAN : chunk.scale;
}
// Values i to i + 7. With `of_product` they lack the codes' factor: the caller multiplies the sums by it in the end,
// and has divided the chunk's offset by it, which saves a multiplication per element. They also skip the check for NaN
// codes, because spread_nan() has been called.
template <typename Codes, bool of_product>
void chunk_values(thread const LoadedChunk<Codes>& chunk, uint i, thread Vectors<2>& values) {
  Vectors<2> codes;
  Codes::template eight<Codes::zero != 0>(chunk.words, i, codes);
#pragma unroll
  for (uint n = 0; n < 8; ++n) {
    const float down = 1 / float(1u << Codes::exponent(i + n));
    const float scale = of_product ? chunk.scale * down : chunk.scale;
    const float code = codes.at[n / 4][n % 4] * (of_product ? 1 : float(Codes::factor) * down);
    const float number = Codes::has_offset ? fma(scale, code, chunk.offset) : scale * code;  // keeps -0
    const float value = !of_product && Codes::is_nan(chunk.words, i + n) ? NAN : number;
    values.at[n / 4][n % 4] = i + n < chunk.count ? value : 0;
  }
}

}  // namespace moe_metal

#define MOE_METAL_TEXT_OF(text) #text
#define MOE_METAL_TEXT(text) MOE_METAL_TEXT_OF(text)
// The part of kernel names before the dtype; empty for dense weights.
#ifdef MOE_METAL_FORMAT
#define weights_suffix "_" MOE_METAL_TEXT(MOE_METAL_FORMAT)
#define weights_codes(columns) moe_metal::formats::MOE_METAL_FORMAT<moe_metal::columns>
#else
#define weights_suffix ""
#endif
