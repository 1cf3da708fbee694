// What the readers of packed weights share. Each reader is a template of the columns of a piece, kPackedColumns or
// kNarrowColumns, and what is below says what they have in common:
//   Layout         where a piece lies in its row, and how it is loaded: Stream, or BlockLayout in ggml.h
//   columns        of a piece; words: that hold it
//   groups         of its columns that have scales of their own, 1 or 2
//   distance       from a wide piece's first 16 columns to its second 16
//   scale_rows     rows that share a scale
//   own_scales     scales and offsets lie beside the codes, and Layout::numbers gives them
//   e8m0_scale     scales are powers of two
//   e4m3_scale     scales are e4m3, times a factor of the matrix where it has one
//   has_offset     a value is scale * factor * code + offset, else scale * (factor * code - zero)
//   factor         what `eight` leaves to be multiplied: so large that no sum of codes is infinite before its scale
//   middle, zero   the middle of the codes, 0 where they have a sign; the code of the value 0, without an offset
//   eight          codes i to i + 7 as floats, each times 2^place(i); of centred ones the middle is taken off
//   is_nan         whether code i is none; nan_bits: not 0 where one of a word's is
// `i` is a constant wherever these are called, in unrolled loops.
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

// `count` words, with loads of `unit` bytes or, of smaller parts, as many as the type of four of them takes: it is
// aligned as one of them.
template <uint unit, uint count, uint N>
void load_words(device const uchar* from, uint first, thread Words<N>& words) {
  static_assert(unit > 2 ? count % (unit / 4) == 0 : true, "words are loaded whole");
  if (unit == 16) {
#pragma unroll
    for (uint n = 0; n < count / 4; ++n) {
      const uint4 four = reinterpret_cast<device const uint4*>(from)[n];
      for (uint m = 0; m < 4; ++m) words.at[first + 4 * n + m] = four[m];
    }
  } else if (unit == 8) {
#pragma unroll
    for (uint n = 0; n < count / 2; ++n) {
      const uint2 two = reinterpret_cast<device const uint2*>(from)[n];
      for (uint m = 0; m < 2; ++m) words.at[first + 2 * n + m] = two[m];
    }
  } else if (unit == 4) {
#pragma unroll
    for (uint n = 0; n < count; ++n) words.at[first + n] = reinterpret_cast<device const uint*>(from)[n];
  } else if (unit == 2) {
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

// The first `count` of a piece's `columns` codes; the others are 0. `aligned`: rows begin where the widest loads that
// the piece's length allows are aligned.
template <uint columns, uint bits, uint N>
void load_codes(device const uchar* from, uint count, bool aligned, thread Words<N>& words) {
  constexpr uint bytes = columns * bits / 8, unit = bytes_at_once(bytes);
  static_assert(4 * N >= bytes, "a piece fits its words");
  if (aligned && count >= columns) {
    if (unit > 2) {
      constexpr uint load = unit < 4 ? 4 : unit, whole = unit < 4 ? 1 : bytes / 4;  // valid in branches not taken
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

// ------------------------------------------------------------------------------------------ where pieces lie

// A piece's block begins at `byte` of its row. Within the block it is the `piece`-th wide one or, of 16 columns, the
// `run`-th half of that.
struct Spot {
  uint byte, piece, run;
};

// Codes that follow one another from the lowest bit of a row's first byte on.
template <uint columns, uint bits>
struct Stream {
  static Spot spot(uint column) {
    Spot found = {};
    found.byte = column / 8 * bits;
    return found;
  }
  template <uint N>
  static void load(device const uchar* row, Spot spot, uint count, bool aligned, thread Words<N>& words) {
    load_codes<columns, bits>(row + spot.byte, count, aligned, words);
  }
  template <uint N, uint G>
  static void numbers(thread const Words<N>&, Spot, thread Floats<G>&, thread Floats<G>&) {}
};

}  // namespace moe_metal
