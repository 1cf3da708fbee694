// Shared by the readers of packed weights. A reader is a template over the columns of a chunk, kPackedColumns (wide) or
// kNarrowColumns, with these members:
//   Layout         the position of a chunk in its row, and how to load it: PlainLayout, or BlockLayout in ggml.h
//   columns        of a chunk; words: the number of words that hold it
//   groups         the number of groups of a chunk with separate scales, 1 or 2
//   distance       from the first 16 columns of a wide chunk to the second 16
//   scale_rows     the number of rows that share a scale
//   own_scales     the blocks contain scales and offsets, which Layout::numbers returns
//   e8m0_scale     scales are powers of two
//   e4m3_scale     scales are e4m3, times the matrix's factor if it has one
//   has_offset     a value is scale * factor * code + offset, else scale * (factor * code - zero)
//   factor         the factor by which codes from `eight` are too small: it keeps sums finite until they are scaled
//   middle, zero   the middle of unsigned codes, else 0; the code of the value 0 in formats without an offset
//   eight          codes i to i + 7 as floats, each times 2^exponent(i); if `centred`, minus the middle
//   is_nan         whether code i is NaN; nan_bits: not 0 if any code of a word is NaN
// `i` is a compile-time constant wherever these are called, in unrolled loops.
#pragma once
#include "common.h"

namespace moe_metal {

template <uint N>
struct Vectors {
  float4 at[N];
};
template <uint N>
struct Floats {
  float at[N];
};
template <uint N>
struct Words {
  uint at[N];
};

// ------------------------------------------------------------------------------------------ loads

// Loads `count` words with loads of `width` bytes. If `width` is 1 or 2, packed vectors are loaded, which have the
// alignment of one element.
template <uint width, uint count, uint N>
void load_words(device const uchar* from, uint first, thread Words<N>& words) {
  static_assert(width > 2 ? count % (width / 4) == 0 : true, "words are loaded whole");
  if (width == 16) {
#pragma unroll
    for (uint n = 0; n < count / 4; ++n) {
      const uint4 four = reinterpret_cast<device const uint4*>(from)[n];
      for (uint m = 0; m < 4; ++m) words.at[first + 4 * n + m] = four[m];
    }
  } else if (width == 8) {
#pragma unroll
    for (uint n = 0; n < count / 2; ++n) {
      const uint2 two = reinterpret_cast<device const uint2*>(from)[n];
      for (uint m = 0; m < 2; ++m) words.at[first + 2 * n + m] = two[m];
    }
  } else if (width == 4) {
#pragma unroll
    for (uint n = 0; n < count; ++n) words.at[first + n] = reinterpret_cast<device const uint*>(from)[n];
  } else if (width == 2) {
#pragma unroll
    for (uint n = 0; n < count / 2; ++n) {
      const uint2 two = as_type<uint2>(ushort4(reinterpret_cast<device const packed_ushort4*>(from)[n]));
      for (uint m = 0; m < 2; ++m) words.at[first + 2 * n + m] = two[m];
    }
    if (count % 2) {
      const ushort2 last = ushort2(*reinterpret_cast<device const packed_ushort2*>(from + 4 * (count - 1)));
      words.at[first + count - 1] = as_type<uint>(last);
    }
  } else {
#pragma unroll
    for (uint n = 0; n < count; ++n) {
      words.at[first + n] = as_type<uint>(uchar4(reinterpret_cast<device const packed_uchar4*>(from)[n]));
    }
  }
}

// Loads the first `count` of a chunk's `columns` codes; the others become 0. `aligned`: rows are aligned for the widest
// loads that the length of a chunk allows.
template <uint columns, uint bits, uint N>
void load_codes(device const uchar* from, uint count, bool aligned, thread Words<N>& words) {
  constexpr uint bytes = columns * bits / 8, width = bytes_at_once(bytes);
  static_assert(4 * N >= bytes, "a chunk fits its words");
  if (aligned && count >= columns) {
    if (width > 2) {
      constexpr uint load = width < 4 ? 4 : width, whole = width < 4 ? 1 : bytes / 4;  // valid in branches not taken
      load_words<load, whole>(from, 0, words);
      return;
    }
#pragma unroll
    for (uint n = 0; n < bytes / 2; ++n) {
      const uint two_bytes = reinterpret_cast<device const ushort*>(from)[n];
      words.at[n / 2] = n % 2 ? words.at[n / 2] | two_bytes << 16 : two_bytes;
    }
    return;
  }
#pragma unroll
  for (uint n = 0; n < N; ++n) words.at[n] = 0;
#pragma unroll
  for (uint n = 0; n < bytes; ++n) {
    if (8 * n < count * bits) words.at[n / 4] |= uint(from[n]) << n % 4 * 8;
  }
}

// ------------------------------------------------------------------------------------------ positions of chunks

// A chunk's block begins at `byte` of its row. It is wide chunk number `chunk` of the block or, if it is narrow, the
// first or the second half of that.
struct ChunkPosition {
  uint byte, chunk, second;
};

// A row of consecutive codes, from the lowest bit of its first byte on.
template <uint columns, uint bits>
struct PlainLayout {
  static ChunkPosition position(uint column) {
    ChunkPosition found = {};
    found.byte = column / 8 * bits;
    return found;
  }
  template <uint N>
  static void load(device const uchar* row, ChunkPosition at, uint count, bool aligned, thread Words<N>& words) {
    load_codes<columns, bits>(row + at.byte, count, aligned, words);
  }
  template <uint N, uint G>
  static void numbers(thread const Words<N>&, ChunkPosition, thread Floats<G>&, thread Floats<G>&) {}
};

}  // namespace moe_metal
