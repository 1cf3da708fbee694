// The table of weight formats. Checks, messages, the shaders' libraries, the CPU's readers and Python's table
// (torch_moe_metal/formats.py) are derived from it. `dequantize` in torch_moe_metal/reference.py defines the values of
// each format. docs/adding.md says how to add a format.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "common.h"

namespace moe_metal {

// The dtypes of a weight's data; uint8 is allowed in every packed format. Dense data have the activations' dtype.
enum class DataType : uint8_t { activation, bytes, words, float8_e4m3fn };
// The number type of a packed weight's scales.
MOE_METAL_ENUM(ScaleType, none, float32_or_bfloat16, any_float, e8m0, e4m3)
// The offsets of a packed weight: none, one for each scale, or an optional factor of the whole matrix.
MOE_METAL_ENUM(OffsetType, none, of_scales, factor)

// A row of a packed weight is a sequence of blocks. scale_columns x scale_rows numbers share a scale; if scale_columns
// is 0, it is one of kAffineGroups, which follows from the shapes. A format with several widths has an entry for each.
struct Format {
  std::string_view name;     // the `format` argument of the ops
  std::string_view library;  // its name in the shaders and in `--formats`
  int bits;                  // of a number, without its share of scales and offsets
  int columns, bytes;        // of a block
  DataType data;
  ScaleType scale;
  int scale_columns, scale_rows;
  OffsetType offset;

  constexpr bool is_dense() const { return data == DataType::activation; }
  // The blocks contain their scales.
  constexpr bool has_own_scales() const { return !is_dense() && scale == ScaleType::none; }
};

// shaders/embed.py parses the second column.
inline constexpr Format kFormats[] = {
    {"dense", "dense", 0, 1, 0, DataType::activation, ScaleType::none, 0, 0, OffsetType::none},
    {"affine", "affine2", 2, 8, 2, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"affine", "affine3", 3, 8, 3, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"affine", "affine4", 4, 8, 4, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"affine", "affine5", 5, 8, 5, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"affine", "affine6", 6, 8, 6, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"affine", "affine8", 8, 8, 8, DataType::words, ScaleType::any_float, 0, 1, OffsetType::of_scales},
    {"mxfp4", "mxfp4", 4, 32, 16, DataType::bytes, ScaleType::e8m0, 32, 1, OffsetType::none},
    {"fp8", "fp8", 8, 1, 1, DataType::float8_e4m3fn, ScaleType::float32_or_bfloat16, 128, 128, OffsetType::none},
    {"mxfp8", "mxfp8", 8, 1, 1, DataType::float8_e4m3fn, ScaleType::e8m0, 32, 1, OffsetType::none},
    {"nvfp4", "nvfp4", 4, 2, 1, DataType::bytes, ScaleType::e4m3, 16, 1, OffsetType::factor},
    {"q4_0", "q4_0", 4, 32, 18, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q4_1", "q4_1", 4, 32, 20, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q5_0", "q5_0", 5, 32, 22, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q5_1", "q5_1", 5, 32, 24, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q8_0", "q8_0", 8, 32, 34, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q2_k", "q2_k", 2, 256, 84, DataType::bytes, ScaleType::none, 16, 1, OffsetType::none},
    {"q3_k", "q3_k", 3, 256, 110, DataType::bytes, ScaleType::none, 16, 1, OffsetType::none},
    {"q4_k", "q4_k", 4, 256, 144, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q5_k", "q5_k", 5, 256, 176, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"q6_k", "q6_k", 6, 256, 210, DataType::bytes, ScaleType::none, 16, 1, OffsetType::none},
    {"iq4_nl", "iq4_nl", 4, 32, 18, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"iq4_xs", "iq4_xs", 4, 256, 136, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
    {"ggml_mxfp4", "ggml_mxfp4", 4, 32, 17, DataType::bytes, ScaleType::none, 32, 1, OffsetType::none},
};
inline constexpr int kFormatCount = std::size(kFormats);
// How many neighbouring columns share an affine scale.
inline constexpr std::array<int64_t, 4> kAffineGroups = {16, 32, 64, 128};

// The choices for affine weights as error messages list them: "2, 3, 4, 5, 6 or 8", and "16, 32, 64 or 128".
inline void append_choice(std::string& text, int64_t choice) {
  if (const size_t last = text.find(" or "); last != std::string::npos) text.replace(last, 4, ", ");
  text.append(text.empty() ? "" : " or ").append(std::to_string(choice));
}
inline std::string affine_widths() {
  std::string text;
  for (const Format& format : kFormats) {
    if (format.data == DataType::words) append_choice(text, format.bits);
  }
  return text;
}
inline std::string affine_groups() {
  std::string text;
  for (const int64_t group : kAffineGroups) append_choice(text, group);
  return text;
}

// The first entry with this name, or nullptr.
constexpr const Format* find_format(std::string_view name) {
  for (const Format& format : kFormats) {
    if (format.name == name) return &format;
  }
  return nullptr;
}
// The entry with this name and width, or nullptr.
constexpr const Format* find_format(std::string_view name, int64_t bits) {
  for (const Format& format : kFormats) {
    if (format.name == name && format.bits == bits) return &format;
  }
  return nullptr;
}

}  // namespace moe_metal
