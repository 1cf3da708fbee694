// Weights in any format, and the checks of one. torch_moe_metal/reference.py says at `dequantize` what the formats
// mean.
#pragma once
#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "arguments.h"
#include "common.h"

namespace moe_metal {

// A weight matrix, or one for each expert, where it lies: it is never copied, repacked or converted.
struct Weight {
  Tensor data, scale, offset;  // the last two are undefined where the format has none
  Format format = Format::dense;
  int64_t rows = 0, columns = 0;
  int64_t bits = 0, group = 0;              // of a packed number; neighbouring columns that share a scale
  int64_t expert = 0, row = 0, column = 0;  // from one to the next: elements of dense data, bytes of packed
};

// What an op calls a weight's three tensors, and the letters of its shape, of which the last is the column's.
struct WeightNames {
  const char *data, *scale, *offset;
  std::string_view letters;
};

constexpr std::array kFormats = {"dense", "affine", "mxfp4", "fp8"};
// Of affine numbers, and how many neighbouring ones share a scale.
constexpr std::array<int64_t, 6> kAffineBits = {2, 3, 4, 5, 6, 8};
constexpr std::array<int64_t, 4> kAffineGroups = {16, 32, 64, 128};
template <size_t N>
bool is_one_of(const std::array<int64_t, N>& choices, int64_t value) {
  return std::find(choices.begin(), choices.end(), value) != choices.end();
}
constexpr int64_t kMxfp4Group = 32, kFp8Block = 128;

// The product of sizes, or as much as an int64 holds: an expanded tensor may have 2^62 columns.
inline int64_t bounded_product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<int64_t>::max();
  }
  return product;
}

// The checks of one packed weight.
class PackedWeight {
 public:
  PackedWeight(Arguments& args, const WeightNames& names, const Tensor& data, const OptionalTensor& scale,
               const OptionalTensor& offset, Format format, int64_t group_size)
      : args_(args), names_(names), scale_(scale), offset_(offset), group_size_(group_size) {
    weight_.data = data;
    weight_.format = format;
  }

  Weight checked() {
    check_group_size();
    check_data();
    check_scale();
    check_offset();
    return weight_;
  }

 private:
  bool is(Format format) const { return weight_.format == format; }
  std::string format() const { return kFormats[static_cast<int>(weight_.format)]; }
  char column_letter() const { return names_.letters.back(); }
  std::string_view row_letters() const { return names_.letters.substr(0, names_.letters.size() - 1); }
  // [.., C / 32, 16], as gpt-oss has it, beside a scale of [.., C / 32]
  bool in_blocks() const {
    return is(Format::mxfp4) && Arguments::given(scale_) && weight_.data.dim() == scale_->dim() + 1;
  }

  // Bits and group follow from the columns of x. A given group says how many those must be, since twice the columns
  // in half the bits have the same bytes.
  void check_group_size() const {
    const bool affine = is(Format::affine);
    const int64_t own = is(Format::mxfp4) ? kMxfp4Group : kFp8Block;
    const bool fits = group_size_ == 0 || (affine ? is_one_of(kAffineGroups, group_size_) : group_size_ == own);
    TORCH_CHECK(fits, args_.prefix("group_size"), "expected 0", affine ? ", 16, 32, 64 or 128" : c10::str(" or ", own),
                " beside format ", format(), ", got ", group_size_);
  }

  void check_data() {
    const Tensor& data = weight_.data;
    args_.check_dense(names_.data, data);
    check_data_dtype();
    const int64_t C = args_[column_letter()], packed_dims = in_blocks() ? 2 : 1;
    const std::string packed = packed_columns();
    args_.check_shape(names_.data, data, row_letters(), data.dim() - packed_dims, packed);
    const int64_t bits_of_row =
        bounded_product({data.size(-1), data.element_size(), 8, in_blocks() ? data.size(-2) : 1});
    weight_.bits = is(Format::mxfp4) ? 4 : is(Format::fp8) ? 8 : bits_of_row / std::max<int64_t>(C, 1);
    const bool known = is_one_of(kAffineBits, weight_.bits);
    const bool blocks = !in_blocks() || data.size(-1) == kMxfp4Group / 2;
    if (!known || !blocks || bounded_product({weight_.bits, C}) != bits_of_row) {
      args_.wrong_shape(names_.data, data, row_letters(), packed, column_letter(),
                        is(Format::affine) ? "bits 2, 3, 4, 5, 6 or 8" : "");
    }
    TORCH_CHECK(C % (is(Format::mxfp4) ? kMxfp4Group : 1) == 0, args_.prefix(names_.data), "expected ",
                Arguments::spelled(column_letter()), " to be a multiple of 32 in format mxfp4, got ", C);
    check_strides(packed_dims);
    weight_.columns = C;
    weight_.rows = data.size(-1 - packed_dims);
    weight_.row = data.stride(-1 - packed_dims) * data.element_size();
    weight_.expert = data.dim() > 1 + packed_dims ? data.stride(-2 - packed_dims) * data.element_size() : 0;
    weight_.column = 1;
  }

  // A row's bytes are one run.
  void check_strides(int64_t packed_dims) const {
    const Tensor& data = weight_.data;
    const bool run =
        data.numel() == 0 || ((data.size(-1) <= 1 || data.stride(-1) == 1) &&
                              (packed_dims == 1 || data.size(-2) <= 1 || data.stride(-2) == data.size(-1)));
    TORCH_CHECK(run, args_.prefix(names_.data), "expected rows whose bytes lie side by side, got strides ",
                data.strides());
  }

  void check_data_dtype() const {
    const auto dtype = weight_.data.scalar_type();
    const bool fits = dtype == at::kByte || (is(Format::affine) && (dtype == at::kInt || dtype == at::kUInt32)) ||
                      (is(Format::fp8) && dtype == at::kFloat8_e4m3fn);
    const char* others = is(Format::affine) ? "int32, uint32 or " : is(Format::fp8) ? "float8_e4m3fn or " : "";
    TORCH_CHECK(fits, args_.prefix(names_.data), "expected ", others, "uint8 in format ", format(), ", got ",
                dtype_name(dtype));
  }

  std::string packed_columns() const {
    const std::string C = Arguments::spelled(column_letter());
    if (is(Format::mxfp4)) return in_blocks() ? C + " / 32, 16" : C + " / 2";
    if (is(Format::fp8)) return C;
    return C + (weight_.data.element_size() == 4 ? " * bits / 32" : " * bits / 8");
  }

  void check_scale() {
    TORCH_CHECK(Arguments::given(scale_), args_.prefix(names_.scale), "expected a tensor beside format ", format(),
                ", got none");
    const Tensor& scale = weight_.scale = *scale_;
    args_.check_dense(names_.scale, scale);
    const auto dtype = scale.scalar_type();
    const bool floats = dtype == at::kFloat || dtype == at::kBFloat16;
    if (is(Format::affine)) {
      TORCH_CHECK(floats || dtype == at::kHalf, args_.prefix(names_.scale),
                  "expected float32, float16 or bfloat16 in format affine, got ", dtype_name(dtype));
    } else if (is(Format::mxfp4)) {
      TORCH_CHECK(dtype == at::kByte, args_.prefix(names_.scale), "expected uint8 in format mxfp4, got ",
                  dtype_name(dtype));
    } else {
      TORCH_CHECK(floats, args_.prefix(names_.scale), "expected float32 or bfloat16 in format fp8, got ",
                  dtype_name(dtype));
    }
    is(Format::fp8) ? check_blocks() : check_groups();
  }

  void check_groups() {
    const Tensor& scale = weight_.scale;
    const std::string C = Arguments::spelled(column_letter()), groups = C + (is(Format::affine) ? " / group" : " / 32");
    args_.check_shape(names_.scale, scale, row_letters(), scale.dim() - 1, groups);
    weight_.group = is(Format::mxfp4) ? kMxfp4Group : weight_.columns / std::max<int64_t>(scale.size(-1), 1);
    const bool fits = is(Format::mxfp4) || group_size_ == 0 || weight_.group == group_size_;
    if (!fits || !is_one_of(kAffineGroups, weight_.group) || weight_.group * scale.size(-1) != weight_.columns) {
      const std::string choices = group_size_ == 0 ? "16, 32, 64 or 128" : c10::str(group_size_);
      args_.wrong_shape(names_.scale, scale, row_letters(), groups, column_letter(),
                        is(Format::affine) ? "group " + choices : "");
    }
  }

  void check_blocks() {
    const Tensor& scale = weight_.scale;
    weight_.group = kFp8Block;
    auto expected = weight_.data.sizes().vec();
    for (size_t d = expected.size() - 2; d < expected.size(); ++d)
      expected[d] = expected[d] / kFp8Block + (expected[d] % kFp8Block != 0);  // there are up to 2^63 - 1 rows
    TORCH_CHECK(scale.sizes() == expected, args_.prefix(names_.scale), "expected shape ", at::IntArrayRef(expected),
                ", a scale for each 128 x 128 block of ", names_.data, "; got ", scale.sizes());
  }

  void check_offset() {
    if (!is(Format::affine)) {
      TORCH_CHECK(!Arguments::given(offset_), args_.prefix(names_.offset), "expected none beside format ", format(),
                  ", got a tensor");
      return;
    }
    TORCH_CHECK(Arguments::given(offset_), args_.prefix(names_.offset),
                "expected a tensor beside format affine, got none");
    const Tensor &scale = weight_.scale, &offset = weight_.offset = *offset_;
    args_.check_dense(names_.offset, offset);
    TORCH_CHECK(offset.scalar_type() == scale.scalar_type(), args_.prefix(names_.offset), "expected ",
                dtype_name(scale.scalar_type()), ", the dtype of ", names_.scale, "; got ",
                dtype_name(offset.scalar_type()));
    TORCH_CHECK(offset.sizes() == scale.sizes(), args_.prefix(names_.offset), "expected shape ", scale.sizes(),
                ", that of ", names_.scale, "; got ", offset.sizes());
  }

  Arguments& args_;
  const WeightNames& names_;
  const OptionalTensor &scale_, &offset_;
  const int64_t group_size_;
  Weight weight_;
};

inline Weight Arguments::weight(const WeightNames& names, const Tensor& data, const OptionalTensor& scale,
                                const OptionalTensor& offset, std::string_view format, int64_t group_size,
                                bool transposed) {
  const auto used = one_of<Format>("format", format, kFormats);
  if (used != Format::dense) {
    TORCH_CHECK(!transposed, prefix("transposed"), "expected False beside format ", format, ", got True");
    return PackedWeight(*this, names, data, scale, offset, used, group_size).checked();
  }
  TORCH_CHECK(group_size == 0, prefix("group_size"), "expected 0 beside format dense, got ", group_size);
  TORCH_CHECK(!given(scale), prefix(names.scale), "expected none beside format dense, got a tensor");
  TORCH_CHECK(!given(offset), prefix(names.offset), "expected none beside format dense, got a tensor");
  check_given(names.data, data);
  TORCH_CHECK(is_activation(data.scalar_type()), prefix(names.data),
              "expected float32, float16 or bfloat16 in format dense, got ", dtype_name(data.scalar_type()));
  std::string letters(names.letters);
  if (transposed) std::swap(letters.end()[-1], letters.end()[-2]);
  activation(names.data, data, letters.c_str());
  const int row = transposed ? -1 : -2, column = transposed ? -2 : -1;
  return {.data = data,
          .rows = data.size(row),
          .columns = data.size(column),
          .expert = data.dim() > 2 ? data.stride(-3) : 0,
          .row = data.stride(row),
          .column = data.stride(column)};
}

}  // namespace moe_metal
