// GGML's blocks of 32 columns: q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, ggml_mxfp4.
#pragma once
#include "formats/ggml.h"

namespace moe_metal {

// d as half (and m, in q4_1), then bytes with codes i and i + 16.
template <typename V, bool has_m>
struct Nibbles32 {
  using Values = V;
  enum : uint {
    block_columns = 32,
    bytes = has_m ? 20 : 18,
    alignment = bytes_at_once(bytes),
    words = 4,
    number_words = 1,
    groups = 1,
    distance = 16,
    apart = 0,
    shift = 4,
    has_offset = has_m
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition, thread Words<N>& loaded) {
    load_words<width, count>(block + (bytes - 16), 0, loaded);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition, thread Words<1>& loaded) {
    if (has_m) {
      load_words<width, 1>(block, 0, loaded);
    } else {
      loaded.at[0] = load_half<width>(block);
    }
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint, uint odd) {
    return loaded.at[k] >> 8 * odd;
  }
  static void numbers(thread const Words<1>& loaded, ChunkPosition, thread Floats<1>& scale, thread Floats<1>& offset) {
    const float2 both = halves_of(loaded.at[0]);
    scale.at[0] = both.x;
    offset.at[0] = both.y;
  }
};

// The same with the fifth bits of all codes in a word before the bytes.
template <bool has_m>
struct Fives32 {
  using Values = Integers<5>;
  enum : uint {
    block_columns = 32,
    bytes = has_m ? 24 : 22,
    alignment = bytes_at_once(bytes),
    words = 5,
    number_words = 1,
    groups = 1,
    distance = 16,
    apart = 0,
    shift = 0,
    has_offset = has_m
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition, thread Words<N>& loaded) {
    load_words<width, 4>(block + (bytes - 16), 0, loaded);
    load_words < width<4 ? width : 4, 1>(block + (bytes - 20), 4, loaded);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition, thread Words<1>& loaded) {
    if (has_m) {
      load_words < width<4 ? width : 4, 1>(block, 0, loaded);
    } else {
      loaded.at[0] = load_half<width>(block);
    }
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint second, uint odd) {
    const uint fifths = loaded.at[4] >> (16 * second + 4 * k) & 0xf;
    const uint spread = fifths * 0x02040810u & 0x10101010u;  // bit n is bit 8n + 4
    return ((loaded.at[k] >> (4 * second) & 0x0f0f0f0fu) | spread) >> 8 * odd;
  }
  static void numbers(thread const Words<1>& loaded, ChunkPosition, thread Floats<1>& scale, thread Floats<1>& offset) {
    const float2 both = halves_of(loaded.at[0]);
    scale.at[0] = both.x;
    offset.at[0] = both.y;
  }
};

// d as half, then 32 signed integers, which become unsigned by adding 128.
struct Q8_0 {
  using Values = Integers<8>;
  enum : uint {
    block_columns = 32,
    bytes = 34,
    alignment = bytes_at_once(bytes),
    words = 8,
    number_words = 1,
    groups = 1,
    distance = 16,
    apart = 1,
    shift = 0,
    has_offset = 0
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition at, thread Words<N>& loaded) {
    load_words<width, count>(block + 2 + 16 * at.second, 0, loaded);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition, thread Words<1>& loaded) {
    loaded.at[0] = load_half<width>(block);
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint second, uint odd) {
    return (loaded.at[4 * second + k] ^ 0x80808080u) >> 8 * odd;
  }
  static void numbers(thread const Words<1>& loaded, ChunkPosition, thread Floats<1>& scale, thread Floats<1>&) {
    scale.at[0] = halves_of(loaded.at[0]).x;
  }
};

// A scale of 2^(byte - 128), then bytes with codes i and i + 16. Blocks may begin at any byte.
struct GgmlMxfp4 {
  using Values = DoubledE2m1;
  enum : uint {
    block_columns = 32,
    bytes = 17,
    alignment = 1,
    words = 4,
    number_words = 1,
    groups = 1,
    distance = 16,
    apart = 0,
    shift = 4,
    has_offset = 0
  };
  template <uint width, uint count, uint N>
  static void load(device const uchar* block, ChunkPosition, thread Words<N>& loaded) {
    load_words<1, count>(block + 1, 0, loaded);
  }
  template <uint width>
  static void load_numbers(device const uchar* block, ChunkPosition, thread Words<1>& loaded) {
    loaded.at[0] = *block;
  }
  template <uint N>
  static uint pair(thread const Words<N>& loaded, uint k, uint, uint odd) {
    return loaded.at[k] >> 8 * odd;
  }
  // The two smallest scales are subnormal: a GPU that flushes subnormals makes them 0.
  static void numbers(thread const Words<1>& loaded, ChunkPosition, thread Floats<1>& scale, thread Floats<1>&) {
    const uint exponent = loaded.at[0];
    scale.at[0] = as_type<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
  }
};

namespace formats {
template <uint columns>
using q4_0 = Blocks<Nibbles32<Integers<4>, false>, columns>;
template <uint columns>
using q4_1 = Blocks<Nibbles32<Integers<4>, true>, columns>;
template <uint columns>
using iq4_nl = Blocks<Nibbles32<Iq4, false>, columns>;
template <uint columns>
using q5_0 = Blocks<Fives32<false>, columns>;
template <uint columns>
using q5_1 = Blocks<Fives32<true>, columns>;
template <uint columns>
using q8_0 = Blocks<Q8_0, columns>;
template <uint columns>
using ggml_mxfp4 = Blocks<GgmlMxfp4, columns>;
}  // namespace formats

}  // namespace moe_metal
