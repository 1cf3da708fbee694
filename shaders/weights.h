// Weights in every format: where they lie, and one reader for each. reference.py says at `dequantize` what they mean.
//
// A library knows one format: MOE_METAL_FORMAT is its `library` in csrc/formats.h, not defined for dense weights, and
// `weights_codes` is its reader, of this name in `formats`.
// Packed rows are read in pieces of kPackedColumns, which are `bits` words whatever the bits are, or of kNarrowColumns.
//
// What differs on Apple's GPUs, by published measurements: integers become floats and are shifted at a quarter of the
// rate of masks and additions, so codes become numbers by their bits, two at once as half2 where their width allows.
// Half is an operand's type there, so that making it float is free, where NVIDIA's GPUs spend an instruction. Codes
// rely on subnormal halves to stay what they are, as MLX's readers of e2m1 and e4m3 do on every Apple GPU. Registers
// are fewer: a lane holds the words of four rows, 16 of 4 bits and 32 of 8, beside 32 of x.
#pragma once
#include "common.h"

namespace moe_metal {

// A weight's memory, from the expert on that is meant. Dense data are of T, packed data are bytes, and so are scales.
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

// ------------------------------------------------------------------------------------------ 16 bytes at once

template <uint N>
struct Vectors {
  float4 at[N];
};

// 16 bytes hold four floats, or eight of half or bfloat: one or two vectors of four.
template <typename T>
struct Wide {
  enum : uint { vectors = sizeof(T) == 4 ? 1 : 2, elements = 4 * vectors };
  using Values = Vectors<vectors>;
};

// Eight numbers, as they were loaded.
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
// Floats that meet eight of half or bfloat, or of codes.
inline void load_wide(device const float* source, thread Vectors<2>& values) {
  values.at[0] = reinterpret_cast<device const float4*>(source)[0];
  values.at[1] = reinterpret_cast<device const float4*>(source)[1];
}

// ------------------------------------------------------------------------------------------ numbers of any type

// 2^(byte - 127), of which 255 is NaN. The smallest is no normal float: a GPU without those makes it 0.
inline float e8m0(uchar byte) {
  return as_type<float>(byte == 255 ? 0x7fc00000u : byte ? uint(byte) << 23 : 0x00400000u);
}

inline float load_number(device const uchar* at, NumberType type) {
  if (type == NumberType::e8m0) return e8m0(*at);
  if (type == NumberType::float32) return *reinterpret_cast<device const float*>(at);
  if (type == NumberType::float16) return float(*reinterpret_cast<device const half*>(at));
  return float(*reinterpret_cast<device const bfloat*>(at));
}

template <uint N>
struct Offsets {
  long at[N];
};
template <uint N>
struct Floats {
  float at[N];
};
// The scales, or offsets, of some rows. The type is asked for once, so that their loads overlap.
template <typename Codes, uint N>
void load_scales(device const uchar* from, thread const Offsets<N>& rows, NumberType type, thread Floats<N>& to) {
  if (Codes::e8m0_scale) {
    for (uint r = 0; r < N; ++r) to.at[r] = e8m0(from[rows.at[r]]);
  } else if (type == NumberType::float32) {
    for (uint r = 0; r < N; ++r) to.at[r] = *reinterpret_cast<device const float*>(from + rows.at[r]);
  } else if (type == NumberType::float16) {
    for (uint r = 0; r < N; ++r) to.at[r] = float(*reinterpret_cast<device const half*>(from + rows.at[r]));
  } else {
    for (uint r = 0; r < N; ++r) to.at[r] = float(*reinterpret_cast<device const bfloat*>(from + rows.at[r]));
  }
}

// ------------------------------------------------------------------------------------------ codes

// The bytes of one piece of a row, from its first code's lowest bit on; 0 beyond the row's end.
template <uint N>
struct Words {
  uint at[N];
};

// What the readers below have in common:
//   bits           of a code; codes follow one another from the lowest bit of a row's first byte on
//   scale_rows     rows that share a scale
//   has_offset     a value is scale * factor * code + offset
//   e8m0_scale     scales are powers of two
//   factor         what `eight` leaves to be multiplied: so large that no sum of codes is infinite before its scale
//   middle         of the codes, 0 where they have a sign
//   eight          codes i to i + 7 as floats, each times 2^place(i); of centred ones the middle is taken off
//   is_nan         whether code i is none; nan_bits: not 0 where one of a word's is
// `i` is a constant wherever these are called, in unrolled loops.

template <uint Bits>
struct Affine {
  enum : uint { bits = Bits, scale_rows = 1, has_offset = 1, e8m0_scale = 0, halves = 32 % Bits == 0 };
  enum : uint { factor = halves ? 1 << 24 : 1 << 12, middle = 1 << (Bits - 1) };

  static constexpr uint bit(uint i) { return i * bits % 32; }
  static constexpr uint place(uint i) { return halves ? bit(i) % 8 : 0; }

  // Codes that fill words: code i and its partner, which lies 16 bits higher, are left in their places, as subnormal
  // half, of which 1 is 2^-24. What all rows of weights share, x, is scaled down instead.
  static half2 pair(uint word, uint i) {
    const uint mask = ((1u << bits) - 1) << place(i);
    return as_type<half2>((bit(i) % 16 < 8 ? word : word >> 8) & (mask | mask << 16));
  }
  // Any code, as the low bits of 2^11, of which 1 is 2^-12: it may lie in two words.
  template <bool centred, uint N>
  static float single(thread const Words<N>& words, uint i) {
    const uint word = i * bits / 32;
    uint code = words.at[word] >> bit(i);
    if (bit(i) + bits > 32) code |= words.at[word + 1] << (32 - bit(i));
    return as_type<float>((code & ((1u << bits) - 1)) | 0x45000000u) -
           (2048 + (centred ? float(middle) / float(factor) : 0));
  }
  template <bool centred>
  static float number(half code, uint i) {
    return centred ? float(code) - float(middle) / float(factor) * float(1u << place(i)) : float(code);
  }

  template <bool centred, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
    constexpr uint partner = 16 / bits;
#pragma unroll
    for (uint n = 0; n < 8; ++n) {
      if (!halves) {
        codes.at[n / 4][n % 4] = single<centred>(words, i + n);
      } else if (bit(i + n) < 16 || partner >= 8) {
        const half2 both = pair(words.at[(i + n) * bits / 32], i + n);
        codes.at[n / 4][n % 4] = number<centred>(bit(i + n) < 16 ? both.x : both.y, i + n);
        const uint m = (n + partner) % 8;
        if (partner < 8) codes.at[m / 4][m % 4] = number<centred>(both.y, i + n);
      }
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>&, uint) {
    return false;
  }
  static uint nan_bits(uint) { return 0; }
};

// e2m1 becomes half by its bits: its exponent is 14 smaller there, and 0.5 is a subnormal half.
struct Mxfp4 {
  enum : uint { bits = 4, scale_rows = 1, has_offset = 0, e8m0_scale = 1, factor = 1 << 14, middle = 0 };
  static constexpr uint place(uint) { return 0; }
  template <bool, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const uint top = words.at[i / 8] << (12 - 4 * n);  // codes n and n + 4 are the highest of each half
      const half2 pair = as_type<half2>((top & 0x80008000u) | (top >> 3 & 0x0e000e00u));
      codes.at[0][n] = float(pair.x);
      codes.at[1][n] = float(pair.y);
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>&, uint) {
    return false;
  }
  static uint nan_bits(uint) { return 0; }
};

// e4m3 becomes half by its bits: its exponent is 8 smaller there, and x is scaled down by as much again. 127 and 255
// are NaN, and would become 480.
struct Fp8 {
  enum : uint { bits = 8, scale_rows = 128, has_offset = 0, e8m0_scale = 0, factor = 1 << 16, middle = 0 };
  static constexpr uint place(uint) { return 8; }
  template <bool, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const uint word = words.at[i / 4 + n / 2], top = n % 2 ? word : word << 8;  // bytes n % 2 and n % 2 + 2
      const half2 pair = as_type<half2>((top & 0x80008000u) | (top >> 1 & 0x3f803f80u));
      codes.at[n / 2][n % 2] = float(pair.x);
      codes.at[n / 2][n % 2 + 2] = float(pair.y);
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>& words, uint i) {
    return (words.at[i / 4] >> (i % 4 * 8) & 0x7f) == 0x7f;
  }
  static uint nan_bits(uint word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }
};

namespace formats {
using affine2 = Affine<2>;
using affine3 = Affine<3>;
using affine4 = Affine<4>;
using affine5 = Affine<5>;
using affine6 = Affine<6>;
using affine8 = Affine<8>;
using mxfp4 = Mxfp4;
using fp8 = Fp8;
}  // namespace formats

// The first `count` of a piece's `columns` codes; the others are 0. `aligned`: rows begin where the widest loads that
// the piece's length allows are aligned.
template <typename Codes, uint columns, uint N>
void load_codes(device const uchar* from, uint count, bool aligned, thread Words<N>& words) {
  constexpr uint bytes = columns * Codes::bits / 8, unit = bytes_at_once(bytes);
  static_assert(4 * N >= bytes, "a piece fits its words");
  if (aligned && count >= columns) {
#pragma unroll
    for (uint n = 0; n < bytes / unit; ++n) {
      if (unit == 16) {
        const uint4 four = reinterpret_cast<device const uint4*>(from)[n];
        for (uint m = 0; m < 4; ++m) words.at[(4 * n + m) % N] = four[m];
      } else if (unit == 8) {
        const uint2 two = reinterpret_cast<device const uint2*>(from)[n];
        for (uint m = 0; m < 2; ++m) words.at[(2 * n + m) % N] = two[m];
      } else if (unit == 4) {
        words.at[n % N] = reinterpret_cast<device const uint*>(from)[n];
      } else {
        const uint two_bytes = reinterpret_cast<device const ushort*>(from)[n];
        words.at[n / 2 % N] = n % 2 ? words.at[n / 2 % N] | two_bytes << 16 : two_bytes;
      }
    }
    return;
  }
#pragma unroll
  for (uint n = 0; n < N; ++n) words.at[n] = 0;
#pragma unroll
  for (uint n = 0; n < bytes; ++n) {
    if (8 * n < count * Codes::bits) words.at[n / 4] |= uint(from[n]) << n % 4 * 8;
  }
}

// ------------------------------------------------------------------------------------------ values

// Where a row lies, and its scales and offsets.
struct PackedRow {
  device const uchar* data;
  device const uchar* scale;
  device const uchar* offset;
};
template <typename Codes>
PackedRow packed_row(Weights<uchar> weights, constant WeightParams& params, uint row) {
  PackedRow found;
  found.data = weights.data + row * params.row;
  found.scale = weights.scale + row / Codes::scale_rows * params.scale.row;
  found.offset = weights.offset + row / Codes::scale_rows * params.offset.row;
  return found;
}

// kNarrowColumns of a row, which lie in one group; those from `count` on are 0.
template <typename Codes>
struct PackedPiece {
  Words<(kNarrowColumns * Codes::bits + 31) / 32> words;
  float scale, offset;
  uint count;
};
template <typename Codes>
void load_piece(PackedRow row, constant WeightParams& params, uint column, uint count, bool aligned,
                thread PackedPiece<Codes>& piece) {
  piece.count = count;
  piece.scale = 0;
  piece.offset = 0;
  if (count == 0) return;
  load_codes<Codes, kNarrowColumns>(row.data + column / 8 * Codes::bits, count, aligned, piece.words);
  const long group = column >> params.group_shift;
  piece.scale = load_number(row.scale + group * params.scale.group, params.scale_type);
  if (Codes::has_offset) piece.offset = load_number(row.offset + group * params.offset.group, params.scale_type);
}
// Values i to i + 7.
template <typename Codes>
void piece_values(thread const PackedPiece<Codes>& piece, uint i, thread Vectors<2>& values) {
  Vectors<2> codes;
  Codes::template eight<false>(piece.words, i, codes);
#pragma unroll
  for (uint n = 0; n < 8; ++n) {
    const float code = codes.at[n / 4][n % 4] * (float(Codes::factor) / float(1u << Codes::place(i + n)));
    const float number = Codes::has_offset ? fma(piece.scale, code, piece.offset) : piece.scale * code;  // keeps -0
    const float value = Codes::is_nan(piece.words, i + n) ? NAN : number;
    values.at[n / 4][n % 4] = i + n < piece.count ? value : 0;
  }
}

}  // namespace moe_metal

#define MOE_METAL_TEXT_OF(text) #text
#define MOE_METAL_TEXT(text) MOE_METAL_TEXT_OF(text)
// Of the format's kernels, before the dtype; nothing for dense.
#ifdef MOE_METAL_FORMAT
#define weights_suffix "_" MOE_METAL_TEXT(MOE_METAL_FORMAT)
#define weights_codes moe_metal::formats::MOE_METAL_FORMAT
#else
#define weights_suffix ""
#endif
