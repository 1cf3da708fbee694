// GGML's blocks of 256 columns: q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs. The scale of a group has a few bits, times a
// half.
#pragma once
#include "formats/ggml.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ 4 and 5 bits

// d and dmin as half, then 12 bytes with a 6-bit scale and a 6-bit offset for each of eight groups; then, in q5_k, 32
// bytes whose bit g is the fifth bit of group g; then, for each j, 32 bytes with the codes of groups 2j and 2j + 1.
template <bool is_q5>
struct Groups32 {
  using Values = Integers<is_q5 ? 5 : 4>;
  enum : uint {
    block_columns = 256,
    bytes = is_q5 ? 176 : 144,
    alignment = bytes_at_once(bytes),
    words = is_q5 ? 8 : 4,
    number_words = 3,
    groups = 2,
    distance = 32,
    apart = 0,
    shift = 4,
    has_offset = 1
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, 4>(block + (bytes - 128) + 16 * at.chunk, 0, loaded);
    if (!is_q5) return;
    load_words<width, 4>(block + 16 + at.chunk % 2 * 16, N - 4, loaded);
#pragma unroll
    for (uint k = 4; k < N; ++k) loaded.at[k] = loaded.at[k] >> (at.chunk & ~1u);  // bits 0, 1: the two groups
  }
  // d and dmin; the scales and offsets of two of the first four groups; the lower bits of two of the last four groups.
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition at, thread Words<3>& loaded) {
    load_words < width<4 ? width : 4, 1>(block, 0, loaded);
    device const uchar* pairs = block + 4 + at.chunk / 2 % 2 * 2;
    loaded.at[1] = as_type<uint>(ushort2(ushort(load_half<width>(pairs)), ushort(load_half<width>(pairs + 4))));
    loaded.at[2] = load_half<width>(pairs + 8);
  }
  // In q5_k, the lowest bits of a byte of the second four words are the fifth bits of both groups.
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint second, uint odd) {
    const uint nibbles = loaded.at[k] >> 8 * odd;
    if (!is_q5) return nibbles;
    const uint fifths = loaded.at[N > 4 ? 4 + k : 0];
    const uint moved = odd ? fifths >> (second ? 1 : 4) : fifths << (second ? 7 : 4);
    return (nibbles & 0x000f000fu << 4 * second) | (moved & 0x00100010u << 4 * second);
  }
  static void numbers(thread const Words<3>& loaded, ChunkPosition at, thread Floats<2>& scale,
                      thread Floats<2>& offset) {
    const uint first = loaded.at[1], low = loaded.at[2];
    const uint last =
        (as_type<uint>(ushort2(ushort(low), ushort(low >> 4))) & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
    const uint codes = at.chunk < 4 ? first & 0x3f3f3f3fu : last;
    const float2 both = halves_of(loaded.at[0]) * float2(kHalfUnits, -kHalfUnits);
    const float2 one = halves_of(codes & 0x00ff00ffu) * both, two = halves_of(codes >> 8 & 0x00ff00ffu) * both;
    scale.at[0] = one.x;
    scale.at[1] = two.x;
    offset.at[0] = one.y;
    offset.at[1] = two.y;
  }
};

// ------------------------------------------------------------------------------------------ 2, 3 and 6 bits

// Groups of 16 columns. In q2_k and q3_k a byte holds four codes, 32 columns apart; a chunk has two of them.
inline uint pair_shift(ChunkPosition at) { return at.chunk / 2 % 2 * 4; }

// 16 bytes with a 4-bit scale and a 4-bit offset each, 64 bytes of codes, d and dmin as half.
struct Q2_K {
  using Values = Integers<2>;
  enum : uint {
    block_columns = 256,
    bytes = 84,
    alignment = bytes_at_once(bytes),
    words = 4,
    number_words = 2,
    groups = 2,
    distance = 32,
    apart = 0,
    shift = 2,
    has_offset = 1
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, 4>(block + 16 + at.chunk / 4 * 32 + at.chunk % 2 * 16, 0, loaded);
#pragma unroll
    for (uint k = 0; k < 4; ++k) loaded.at[k] = loaded.at[k] >> pair_shift(at);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition at, thread Words<2>& loaded) {
    load_words<width, 1>(block + 80, 0, loaded);
    loaded.at[1] = two_bytes(block + at.chunk / 4 * 8 + pair_shift(at) + at.chunk % 2, 2);
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint, uint odd) {
    return loaded.at[k] >> 8 * odd;
  }
  static void numbers(thread const Words<2>& loaded, ChunkPosition, thread Floats<2>& scale, thread Floats<2>& offset) {
    const float2 both = halves_of(loaded.at[0]);
    const float2 scales = halves_of(loaded.at[1] & 0x000f000fu) * (both.x * kHalfUnits);
    const float2 offsets = halves_of(loaded.at[1] & 0x00f000f0u) * (both.y * (-kHalfUnits / 16));
    for (uint g = 0; g < 2; ++g) {
      scale.at[g] = scales[g];
      offset.at[g] = offsets[g];
    }
  }
};

// 32 bytes with the third bits of the codes, 64 bytes with their other bits, 12 bytes with a 6-bit scale for each
// group, and d as half.
struct Q3_K {
  using Values = Integers<3>;
  enum : uint {
    block_columns = 256,
    bytes = 110,
    alignment = bytes_at_once(bytes),
    words = 8,
    number_words = 3,
    groups = 2,
    distance = 32,
    apart = 0,
    shift = 1,
    has_offset = 0
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, 4>(block + 32 + at.chunk / 4 * 32 + at.chunk % 2 * 16, 0, loaded);
    load_words<width, 4>(block + at.chunk % 2 * 16, 4, loaded);
#pragma unroll
    for (uint k = 0; k < 4; ++k) {
      loaded.at[k] = loaded.at[k] >> pair_shift(at);
      loaded.at[4 + k] = loaded.at[4 + k] >> (at.chunk & ~1u);  // bits 0, 1: the two groups
    }
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition at, thread Words<3>& loaded) {
    loaded.at[0] = load_half<width>(block + 108);
    loaded.at[1] = two_bytes(block + 96 + pair_shift(at) + at.chunk % 2, 2);
    loaded.at[2] = two_bytes(block + 104 + at.chunk % 2, 2);
  }
  // The codes of the second group are one bit higher, so that one shift is right for the third bits of both groups.
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint second, uint odd) {
    const uint twos = loaded.at[k] >> second & 0x03030303u << second;
    return (twos | (loaded.at[4 + k] << 2 & 0x04040404u << second)) >> 8 * odd;
  }
  static void numbers(thread const Words<3>& loaded, ChunkPosition at, thread Floats<2>& scale, thread Floats<2>&) {
    const uint low = loaded.at[1] >> (at.chunk / 4 * 4) & 0x000f000fu;
    const uint high = loaded.at[2] >> (at.chunk & ~1u) & 0x00030003u;
    const float2 scales = halves_of(low | high << 4) - 32 / kHalfUnits;
    const float d = halves_of(loaded.at[0]).x * kHalfUnits;
    scale.at[0] = scales.x * d;
    scale.at[1] = scales.y * d;
  }
};

// 64 bytes with the lower 4 bits of the codes for each half of the columns; 32 bytes with their upper 2 bits for each
// half; a signed byte as the scale of each group; d as half.
struct Q6_K {
  using Values = Integers<6>;
  enum : uint {
    block_columns = 256,
    bytes = 210,
    alignment = bytes_at_once(bytes),
    words = 8,
    number_words = 2,
    groups = 2,
    distance = 64,
    apart = 0,
    shift = 4,
    has_offset = 0
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, 4>(block + 16 * at.chunk, 0, loaded);
    load_words<width, 4>(block + 128 + at.chunk / 4 * 32 + at.chunk % 2 * 16, 4, loaded);
#pragma unroll
    for (uint k = 4; k < 8; ++k) loaded.at[k] = loaded.at[k] >> (at.chunk & 2);  // bits 0, 1 and 4, 5: the two halves
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition at, thread Words<2>& loaded) {
    loaded.at[0] = load_half<width>(block + 208);
    loaded.at[1] = two_bytes(block + 192 + at.chunk / 4 * 8 + at.chunk % 4, 4);
  }
  // The codes of the second half keep their bit positions, too: a subnormal half has ten bits.
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint second, uint odd) {
    const uint high = odd ? loaded.at[4 + k] >> 4 : loaded.at[4 + k] << 4;
    return (loaded.at[k] >> 8 * odd & 0x000f000fu << 4 * second) | (high & 0x00300030u << 4 * second);
  }
  static void numbers(thread const Words<2>& loaded, ChunkPosition, thread Floats<2>& scale, thread Floats<2>&) {
    const float2 scales = halves_of(loaded.at[1] ^ 0x00800080u) - 128 / kHalfUnits;
    const float d = halves_of(loaded.at[0]).x * kHalfUnits;
    scale.at[0] = scales.x * d;
    scale.at[1] = scales.y * d;
  }
};

// ------------------------------------------------------------------------------------------ iq4_xs

// d as half, the upper 2 bits of eight scales, their lower 4 bits, and bytes with codes i and i + 16.
struct Iq4Xs {
  using Values = Iq4;
  enum : uint {
    block_columns = 256,
    bytes = 136,
    alignment = bytes_at_once(bytes),
    words = 4,
    number_words = 2,
    groups = 1,
    distance = 16,
    apart = 0,
    shift = 4,
    has_offset = 0
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, 4>(block + 8 + 16 * at.chunk, 0, loaded);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition at, thread Words<2>& loaded) {
    load_words < width<4 ? width : 4, 1>(block, 0, loaded);
    loaded.at[1] = block[4 + at.chunk / 2];
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint, uint odd) {
    return loaded.at[k] >> 8 * odd;
  }
  static void numbers(thread const Words<2>& loaded, ChunkPosition at, thread Floats<1>& scale, thread Floats<1>&) {
    const uint low = loaded.at[1] >> (at.chunk % 2 * 4) & 0xf, high = loaded.at[0] >> (16 + 2 * at.chunk) & 3;
    const float d = halves_of(loaded.at[0]).x * kHalfUnits;
    scale.at[0] = (halves_of(low | high << 4).x - 32 / kHalfUnits) * d;
  }
};

namespace formats {
template <uint columns>
using q2_k = Blocks<Q2_K, columns>;
template <uint columns>
using q3_k = Blocks<Q3_K, columns>;
template <uint columns>
using q4_k = Blocks<Groups32<false>, columns>;
template <uint columns>
using q5_k = Blocks<Groups32<true>, columns>;
template <uint columns>
using q6_k = Blocks<Q6_K, columns>;
template <uint columns>
using iq4_xs = Blocks<Iq4Xs, columns>;
}  // namespace formats

}  // namespace moe_metal
