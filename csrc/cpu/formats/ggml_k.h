// GGML's blocks of 256 columns: a float16 factor of the scales, in some formats one of the offsets, and scales and
// offsets of a few bits for each group.
#pragma once
#include "cpu/formats/ggml_32.h"

namespace moe_metal {

template <int bytes, int group, bool has_offset, int middle>
struct BlocksOf256 {
  static constexpr int kColumns = 256, kBytes = bytes, kGroup = group, kGroups = 256 / group, kMiddle = middle;
  static constexpr bool kOffset = has_offset;
  static constexpr float kUnit = 1;
};

// to[g] = factor * scale[g] for the groups of a block.
template <size_t groups>
inline void scaled_by(float factor, const std::array<int8_t, groups>& scale, float* to) {
  Bytes integers = {};
  std::memcpy(&integers, scale.data(), groups);
  Sixteen numbers;
  signed_floats(integers, numbers);
  for_each_vector(groups, [&](int64_t g, auto n) { store(to + g, numbers[g / kLanes] * Vec(factor), n); });
}

// 4-bit codes: the low halves of 32 bytes are 32 columns, and the high halves are the next 32.
template <class Of>
inline Of nibbles_of_32(const uint8_t* codes, int64_t column) {
  return shifted(load_bytes<Of>(codes + column / 64 * 32 + column % 32), column / 32 % 2 * 4, 15);
}

// Blocks that begin with two float16 factors, and 12 bytes with a 6-bit scale and a 6-bit offset for each of 8 groups.
template <int bytes, int middle>
struct SixBitScales : BlocksOf256<bytes, 32, true, middle> {
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    for (int64_t b = 0; b < blocks; ++b, row += bytes, scale += 8, offset += 8) {
      // Each word has four groups: the lower 6 bits are for the first four, the upper 2 bits for the last four.
      const uint32_t first = load_word(row + 4), second = load_word(row + 8), low = load_word(row + 12);
      const auto integers = [](uint32_t of_first, uint32_t of_others) {
        const uint32_t others = of_others | (of_first >> 6 & 0x03030303) << 4;
        return std::bit_cast<std::array<int8_t, 8>>((of_first & 0x3f3f3f3f) | uint64_t{others} << 32);
      };
      scaled_by(half_at(row), integers(first, low & 0x0f0f0f0f), scale);
      scaled_by(-half_at(row + 2), integers(second, low >> 4 & 0x0f0f0f0f), offset);
    }
  }
};

struct Q4_K : SixBitScales<144, 8> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    return nibbles_of_32<Of>(block + 16, column);
  }
};

struct Q5_K : SixBitScales<176, 16> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    const Of high = shifted(load_bytes<Of>(block + 16 + column % 32), column / 32, 1);
    return nibbles_of_32<Of>(block + 48, column) | shifted_left<4>(high);
  }
};

struct Q6_K : BlocksOf256<210, 16, false, 32> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    const int64_t half = column / 128, quarter = column % 128 / 32, at = column % 32;
    const Of low = shifted(load_bytes<Of>(block + half * 64 + quarter % 2 * 32 + at), quarter / 2 * 4, 15);
    const Of high = shifted(load_bytes<Of>(block + 128 + half * 32 + at), 2 * quarter, 3);
    return low | shifted_left<4>(high);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      std::array<int8_t, kGroups> integers;
      std::memcpy(&integers, row + 192, sizeof(integers));
      scaled_by(half_at(row + 208), integers, scale);
    }
  }
};

// 2-bit codes: 32 bytes have four times 32 columns.
template <class Of>
inline Of crumbs(const uint8_t* codes, int64_t column) {
  return shifted(load_bytes<Of>(codes + column / 128 * 32 + column % 32), column % 128 / 32 * 2, 3);
}

struct Q2_K : BlocksOf256<84, 16, true, 2> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    return crumbs<Of>(block + 16, column);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float* offset) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups, offset += kGroups) {
      const Bytes both = load_bytes(row);
      scaled_by(half_at(row + 80), std::bit_cast<std::array<int8_t, 16>>(both & 15), scale);
      scaled_by(-half_at(row + 82), std::bit_cast<std::array<int8_t, 16>>(both >> 4), offset);
    }
  }
};

struct Q3_K : BlocksOf256<110, 16, false, 4> {
  template <class Of = Bytes>
  static Of codes(const uint8_t* block, int64_t column) {
    const Of high = shifted(load_bytes<Of>(block + column % 32), column / 32, 1);
    return crumbs<Of>(block + 32, column) | shifted_left<2>(high);
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // Words of 4 groups: the lower 4 bits of scales in halves of bytes, then the upper 2 bits.
      using Words = uint32_t __attribute__((vector_size(16)));
      const uint32_t first = load_word(row + 96), second = load_word(row + 100), high = load_word(row + 104);
      const Words low = Words{first, second, first, second} >> Words{0, 0, 4, 4} & 0x0f0f0f0f;
      const Words all = low | (Words{high, high, high, high} >> Words{0, 2, 4, 6} & 0x03030303) << 4;
      scaled_by(half_at(row + 108), std::bit_cast<std::array<int8_t, 16>>(std::bit_cast<Bytes>(all) - 32), scale);
    }
  }
};

// 4-bit indices into a table, 32 columns at a time with the layout of ggml_32.h.
struct Iq4Xs : BlocksOf256<136, 32, false, 128> {
  static Bytes codes(const uint8_t* block, int64_t column) {
    const Bytes both = load_bytes(block + 8 + column / 32 * 16);
    return look_up(kNonLinear, shifted(both, column / 16 % 2 * 4, 15));
  }
  static void scales(const uint8_t* row, int64_t blocks, float* scale, float*) {
    for (int64_t b = 0; b < blocks; ++b, row += kBytes, scale += kGroups) {
      // The lower 4 bits and the upper 2 bits of each group's scale, expanded to bytes.
      uint64_t low = load_word(row + 4), high = row[2] | row[3] << 8;
      low = (low | low << 16) & 0x0000ffff0000ffff;
      low = (low | low << 8) & 0x00ff00ff00ff00ff;
      low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
      high = (high | high << 24) & 0x000000ff000000ff;
      high = (high | high << 12) & 0x000f000f000f000f;
      high = (high | high << 6) & 0x0303030303030303;
      // Subtracts 32: the highest of 6 bits is flipped and becomes the sign.
      const uint64_t flipped = (low | high << 4) ^ 0x2020202020202020, sign = flipped & 0x2020202020202020;
      const auto integers = std::bit_cast<std::array<int8_t, 8>>(flipped | sign << 1 | sign << 2);
      scaled_by(half_at(row), integers, scale);
    }
  }
};

}  // namespace moe_metal
