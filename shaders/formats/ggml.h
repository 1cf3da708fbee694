// GGML's blocks of 32 or 256 columns, as in a GGUF file. The blocks contain scales and offsets.
//
// A byte holds codes of several columns that are `distance` apart. So a wide chunk has two halves of 16 columns at that
// distance: 16 bytes hold most of it, and no lane loads bytes only for the codes of another lane. A narrow chunk is one
// of the halves, with one byte per code.
//
// The members of a block type:
//   Values         converts codes in bytes to numbers
//   block_columns, bytes  the size of a block; alignment: of its parts, if rows begin at a multiple of that many bytes,
//                  as in files; else blocks are loaded byte by byte
//   words          the words for the codes of a wide chunk; number_words: for its scales and offsets
//   apart          whether its two halves are in different bytes
//   shift          how many bits higher the second half's codes are in the words of `pair` than the first half's
//   load           loads the words of a chunk; load_numbers: those of its scales; loads of `width` bytes are aligned
//   pair           a word whose two 16 bits contain codes 4k and 4k + 2 of the first half (`second` is 0) or the
//   second,
//                  or with `odd` the next of each, among other bits
//   numbers        the scales and offsets of the two halves, or one for both
#pragma once
#include "formats/fp4.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ codes in bytes

inline float4 interleaved(half2 even, half2 odd) {
  return float4(float(even.x), float(odd.x), float(even.y), float(odd.y));
}

// Integer codes, two at a time, as subnormal halves, where the lowest bit is 2^-24. They stay at their bit positions.
template <uint bits>
struct Integers {
  enum : uint { factor = 1 << 24, middle = 1 << (bits - 1), in_place = 1, mask = ((1 << bits) - 1) * 0x10001 };
  template <bool centred, bool>
  static float4 four(uint even, uint odd, uint shift) {
    const float taken = centred ? float(middle) / float(factor) * float(1u << shift) : 0;
    const float4 codes = interleaved(as_type<half2>(even & mask << shift), as_type<half2>(odd & mask << shift));
    return centred ? codes - taken : codes;
  }
};

// e2m1. In GGML the values are doubled, and -0 is 0.
struct DoubledE2m1 {
  enum : uint { factor = 1 << 15, middle = 0, in_place = 0, mask = 0x000f000f };
  template <bool, bool exact>
  static float4 four(uint even, uint odd, uint shift) {
    const half2 one = e2m1_pair(e2m1_upper(even << (12 - shift))), next = e2m1_pair(e2m1_upper(odd << (12 - shift)));
    const float4 codes = interleaved(one, next);
    return exact ? codes + 0.0f : codes;
  }
};

// GGML's table of 16 integers from -127 to 113: a polynomial with an error of at most 0.434, rounded by adding a large
// number. A table in memory would cost a load per code.
struct Iq4 {
  enum : uint { factor = 1 << 12, middle = 0, in_place = 0, mask = 0x000f000f };
  template <bool, bool>
  static float4 four(uint even, uint odd, uint shift) {
    const half2 one = as_type<half2>(even & mask << shift), next = as_type<half2>(odd & mask << shift);
    return float4(integer(one.x, shift), integer(next.x, shift), integer(one.y, shift), integer(next.y, shift));
  }
  static float integer(half code, uint shift) {
    const float one = 16777216.0f / float(1u << shift), x = float(code), unit = 1 / float(factor);
    float y = fma(x, 0.00158604f * unit * one * one * one * one, 0.0310864f * unit * one * one * one);
    y = fma(x, y, -1.37193f * unit * one * one);
    y = fma(x, y, 24.1738f * unit * one);
    y = fma(x, y, -126.567f * unit);
    return (y + 3072) - 3072;  // rounds to multiples of 2^-12, the spacing of floats around 1.5 * 2^11
  }
};

// ------------------------------------------------------------------------------------------ chunks of blocks

// The words of a chunk are its codes, then its scales and offsets.
template <typename Block, uint columns>
struct BlockLayout {
  enum : uint {
    is_wide = columns == kPackedColumns,
    code_words = is_wide ? uint(Block::words) : kNarrowColumns / 4,
    loaded_words = is_wide || !Block::apart ? uint(Block::words) : kNarrowColumns / 4
  };

  static ChunkPosition position(uint column) {
    constexpr uint between = Block::distance / kNarrowColumns;  // the distance of a chunk's halves, in narrow chunks
    const uint within = column % Block::block_columns, narrow = within / kNarrowColumns;
    ChunkPosition found = {};
    found.byte = column / Block::block_columns * Block::bytes;
    found.chunk = is_wide ? within / kPackedColumns : narrow / (2 * between) * between + narrow % between;
    found.second = is_wide ? 0 : narrow / between % 2;
    return found;
  }

  template <uint N>
  static void load(device const uchar* row, ChunkPosition at, uint, bool is_aligned, thread Words<N>& words) {
    if (is_aligned) {
      load_block<Block::alignment>(row + at.byte, at, words);
    } else {
      load_block<1>(row + at.byte, at, words);
    }
  }
  template <uint width, uint N>
  static void load_block(device const uchar* block, ChunkPosition at, thread Words<N>& words) {
    Words<loaded_words> loaded;
    Words<Block::number_words> numbers;
    Block::template load<width, loaded_words>(block, at, loaded);
    Block::template load_numbers<width>(block, at, numbers);
#pragma unroll
    for (uint k = 0; k < code_words; ++k) words.at[k] = word_of(loaded, at, k);
#pragma unroll
    for (uint n = 0; n < Block::number_words; ++n) words.at[code_words + n] = numbers.at[n];
  }
  static uint word_of(thread const Words<loaded_words>& loaded, ChunkPosition at, uint k) {
    if (is_wide) return loaded.at[k];
    const uint second = Block::apart ? 0 : at.second, shift = Block::shift * second, mask = Block::Values::mask;
    return (Block::pair(loaded, k, second, 0) >> shift & mask) | (Block::pair(loaded, k, second, 1) >> shift & mask)
                                                                     << 8;
  }

  template <uint N, uint G>
  static void numbers(thread const Words<N>& words, ChunkPosition at, thread Floats<G>& scale,
                      thread Floats<G>& offset) {
    Words<Block::number_words> loaded;
#pragma unroll
    for (uint n = 0; n < Block::number_words; ++n) loaded.at[n] = words.at[code_words + n];
    Floats<Block::groups> scales, offsets;
    Block::numbers(loaded, at, scales, offsets);
#pragma unroll
    for (uint g = 0; g < G; ++g) {
      const bool last = Block::groups == 2 && (G == 2 ? g == 1 : at.second == 1);
      scale.at[g] = last ? scales.at[Block::groups - 1] : scales.at[0];
      if (Block::has_offset) offset.at[g] = last ? offsets.at[Block::groups - 1] : offsets.at[0];
    }
  }
};

template <typename Block, uint Columns>
struct Blocks {
  using Layout = BlockLayout<Block, Columns>;
  using Values = typename Block::Values;
  enum : uint {
    columns = Columns,
    is_wide = Layout::is_wide,
    words = Layout::code_words + Block::number_words,
    groups = is_wide ? uint(Block::groups) : 1,
    distance = is_wide ? uint(Block::distance) : kNarrowColumns,
    scale_rows = 1,
    own_scales = 1,
    e8m0_scale = 0,
    e4m3_scale = 0,
    has_offset = Block::has_offset,
    factor = Values::factor,
    middle = Values::middle,
    zero = has_offset ? 0 : uint(middle)
  };
  static constexpr uint exponent(uint i) { return is_wide && Values::in_place ? Block::shift * (i / 16) : 0; }
  template <bool centred, uint N>
  static void eight(thread const Words<N>& words, uint i, thread Vectors<2>& codes) {
    const uint second = i / 16, shift = is_wide ? Block::shift * second : 0;
#pragma unroll
    for (uint k = 0; k < 2; ++k) {
      const uint n = i % kNarrowColumns / 4 + k;
      const uint even = is_wide ? Block::pair(words, n, second, 0) : words.at[n];
      const uint odd = is_wide ? Block::pair(words, n, second, 1) : words.at[n] >> 8;
      codes.at[k] = Values::template four<centred, !is_wide>(even, odd, shift);
    }
  }
  template <uint N>
  static bool is_nan(thread const Words<N>&, uint) {
    return false;
  }
  static uint nan_bits(uint) { return 0; }
};

// ------------------------------------------------------------------------------------------ scales and offsets

template <uint width>
uint load_half(device const uchar* from) {
  return width < 2 ? from[0] | uint(from[1]) << 8 : *reinterpret_cast<device const ushort*>(from);
}
inline uint two_bytes(device const uchar* first, uint second) {
  return as_type<uint>(ushort2(ushort(*first), ushort(first[second])));
}

// The lower and the upper half of a word, as floats.
inline float2 halves_of(uint word) {
  const half2 both = as_type<half2>(word);
  return float2(float(both.x), float(both.y));
}
MOE_METAL_CONSTANT float kHalfUnits = 16777216;  // the integer 1 as a subnormal half is 2^-24

}  // namespace moe_metal
