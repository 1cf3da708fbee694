// A weight in any format, and its checks. `dequantize` in torch_moe_metal/reference.py defines the formats.
#pragma once
#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "arguments.h"
#include "formats.h"

namespace moe_metal {

// A weight matrix, or one for each expert, in the caller's memory: it is never copied, repacked or converted.
struct Weight {
  Tensor data, scale, offset;  // scale and offset may be undefined
  const Format* format = kFormats;
  int64_t rows = 0, columns = 0;
  int64_t group = 0;                        // neighbouring columns that share a scale
  int64_t expert = 0, row = 0, column = 0;  // strides: in elements if dense, in bytes if packed
  // If gate and up are separate matrices, row r >= half (of up) starts at r * row + gap.
  int64_t half = std::numeric_limits<int64_t>::max(), gap = 0;

  int64_t row_start(int64_t of_expert, int64_t number) const {
    return of_expert * expert + number * row + (number < half ? 0 : gap);
  }
};

// The argument names of a weight's three tensors, and the letters of its shape; the last letter is for the columns.
struct WeightNames {
  const char *data, *scale, *offset;
  std::string_view letters;
};

template <size_t N>
bool is_one_of(const std::array<int64_t, N>& choices, int64_t value) {
  return std::find(choices.begin(), choices.end(), value) != choices.end();
}

// The product of sizes, saturated at the largest int64: an expanded tensor may have 2^62 columns.
inline int64_t bounded_product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<int64_t>::max();
  }
  return product;
}

// Checks one packed weight.
class PackedWeight {
 public:
  PackedWeight(Arguments& args, const WeightNames& names, const Tensor& data, const OptionalTensor& scale,
               const OptionalTensor& offset, const Format& format, int64_t group_size)
      : args_(args), names_(names), scale_(scale), offset_(offset), format_(format), group_size_(group_size) {
    weight_.data = data;
  }

  Weight checked() {
    check_group_size();
    check_data();
    format_.scale == ScaleType::none ? check_absent(names_.scale, scale_) : check_scale();
    format_.offset == OffsetType::none ? check_absent(names_.offset, offset_) : check_offset();
    return weight_;
  }

 private:
  // The bits and the group size of affine weights follow from the shapes.
  bool is_affine() const { return format_.data == DataType::words; }
  char column_letter() const { return names_.letters.back(); }
  std::string column() const { return Arguments::spelled(column_letter()); }
  std::string_view row_letters() const { return names_.letters.substr(0, names_.letters.size() - 1); }
  // Data of shape [.., C / 32, 16], as in gpt-oss, with scales of shape [.., C / 32].
  bool in_blocks() const {
    return format_.columns == format_.scale_columns && Arguments::given(scale_) &&
           weight_.data.dim() == scale_->dim() + 1;
  }

  // group_size disambiguates: N columns of b bits have as many bytes as 2N columns of b / 2 bits.
  void check_group_size() const {
    const int64_t own = format_.scale_columns;
    const bool fits = group_size_ == 0 || (own ? group_size_ == own : is_one_of(kAffineGroups, group_size_));
    TORCH_CHECK(fits, args_.prefix("group_size"), "expected 0", own ? c10::str(" or ", own) : ", " + affine_groups(),
                " with format ", format_.name, ", got ", group_size_);
  }

  void check_data() {
    const Tensor& data = weight_.data;
    args_.check_dense(names_.data, data);
    check_data_dtype();
    const int64_t C = args_[column_letter()], packed_dims = in_blocks() ? 2 : 1;
    const std::string packed = packed_columns_text();
    args_.check_shape(names_.data, data, row_letters(), data.dim() - packed_dims, packed);
    const int64_t row_bytes = bounded_product({data.size(-1), data.element_size(), in_blocks() ? data.size(-2) : 1});
    weight_.format = &format_;
    if (is_affine())
      weight_.format = find_format(format_.name, bounded_product({row_bytes, 8}) / std::max<int64_t>(C, 1));
    const bool blocks = !in_blocks() || data.size(-1) == format_.bytes;
    const bool fits =
        weight_.format && blocks &&
        bounded_product({weight_.format->bytes, C}) == bounded_product({weight_.format->columns, row_bytes});
    if (!fits) {
      args_.wrong_shape(names_.data, data, row_letters(), packed, column_letter(),
                        is_affine() ? "bits " + affine_widths() : "");
    }
    const int64_t multiple = format_.scale_rows > 1 ? 1 : std::max(format_.columns, format_.scale_columns);
    TORCH_CHECK(is_affine() || C % multiple == 0, args_.prefix(names_.data), "expected ", column(),
                " to be a multiple of ", multiple, " in format ", format_.name, ", got ", C);
    check_strides(packed_dims);
    weight_.columns = C;
    weight_.rows = data.size(-1 - packed_dims);
    weight_.group = format_.scale_columns;
    weight_.row = data.stride(-1 - packed_dims) * data.element_size();
    weight_.expert = data.dim() > 1 + packed_dims ? data.stride(-2 - packed_dims) * data.element_size() : 0;
    weight_.column = 1;
  }

  // The bytes of a row must be contiguous.
  void check_strides(int64_t packed_dims) const {
    const Tensor& data = weight_.data;
    const bool contiguous =
        data.numel() == 0 || ((data.size(-1) <= 1 || data.stride(-1) == 1) &&
                              (packed_dims == 1 || data.size(-2) <= 1 || data.stride(-2) == data.size(-1)));
    TORCH_CHECK(contiguous, args_.prefix(names_.data), "expected rows of contiguous bytes, got strides ",
                data.strides());
  }

  void check_data_dtype() const {
    const auto dtype = weight_.data.scalar_type();
    const bool e4m3 = format_.data == DataType::float8_e4m3fn;
    const bool fits = dtype == at::kByte || (is_affine() && (dtype == at::kInt || dtype == at::kUInt32)) ||
                      (e4m3 && dtype == at::kFloat8_e4m3fn);
    const char* others = is_affine() ? "int32, uint32 or " : e4m3 ? "float8_e4m3fn or " : "";
    TORCH_CHECK(fits, args_.prefix(names_.data), "expected ", others, "uint8 in format ", format_.name, ", got ",
                dtype_name(dtype));
  }

  std::string packed_columns_text() const {
    if (is_affine()) return column() + (weight_.data.element_size() == 4 ? " * bits / 32" : " * bits / 8");
    if (in_blocks()) return c10::str(column(), " / ", format_.columns, ", ", format_.bytes);
    if (format_.has_own_scales()) return c10::str(column(), " / ", format_.columns, " * ", format_.bytes);
    return format_.columns == format_.bytes ? column() : c10::str(column(), " / ", format_.columns / format_.bytes);
  }

  void check_scale() {
    TORCH_CHECK(Arguments::given(scale_), args_.prefix(names_.scale), "expected a tensor with format ", format_.name,
                ", got none");
    const Tensor& scale = weight_.scale = *scale_;
    args_.check_dense(names_.scale, scale);
    check_scale_dtype(scale.scalar_type());
    format_.scale_rows > 1 ? check_squares() : check_groups();
  }

  void check_scale_dtype(at::ScalarType dtype) const {
    const bool floats = dtype == at::kFloat || dtype == at::kBFloat16;
    const auto expect = [&](bool fits, const char* dtypes) {
      TORCH_CHECK(fits, args_.prefix(names_.scale), "expected ", dtypes, " in format ", format_.name, ", got ",
                  dtype_name(dtype));
    };
    switch (format_.scale) {
      case ScaleType::any_float:
        return expect(floats || dtype == at::kHalf, "float32, float16 or bfloat16");
      case ScaleType::float32_or_bfloat16:
        return expect(floats, "float32 or bfloat16");
      case ScaleType::e4m3:
        return expect(dtype == at::kByte || dtype == at::kFloat8_e4m3fn, "float8_e4m3fn or uint8");
      default:
        return expect(dtype == at::kByte, "uint8");
    }
  }

  void check_groups() {
    const Tensor& scale = weight_.scale;
    const int64_t own = format_.scale_columns;
    const std::string groups = own ? c10::str(column(), " / ", own) : column() + " / group";
    args_.check_shape(names_.scale, scale, row_letters(), scale.dim() - 1, groups);
    if (!own) weight_.group = weight_.columns / std::max<int64_t>(scale.size(-1), 1);
    const bool fits =
        own || (is_one_of(kAffineGroups, weight_.group) && (!group_size_ || weight_.group == group_size_));
    if (!fits || weight_.group * scale.size(-1) != weight_.columns) {
      const std::string choices = group_size_ == 0 ? affine_groups() : c10::str(group_size_);
      args_.wrong_shape(names_.scale, scale, row_letters(), groups, column_letter(), own ? "" : "group " + choices);
    }
  }

  // Each block of scale_rows rows and scale_columns columns has one scale.
  void check_squares() {
    const Tensor& scale = weight_.scale;
    const int64_t block = format_.scale_rows;
    auto expected = weight_.data.sizes().vec();
    for (size_t d = expected.size() - 2; d < expected.size(); ++d)
      expected[d] = expected[d] / block + (expected[d] % block != 0);  // no overflow for up to 2^63 - 1 rows
    TORCH_CHECK(scale.sizes() == expected, args_.prefix(names_.scale), "expected shape ", at::IntArrayRef(expected),
                ", a scale for each ", block, " x ", block, " block of ", names_.data, "; got ", scale.sizes());
  }

  void check_absent(const char* name, const OptionalTensor& tensor) const {
    TORCH_CHECK(!Arguments::given(tensor), args_.prefix(name), "expected none with format ", format_.name,
                ", got a tensor");
  }

  void check_offset() {
    if (format_.offset == OffsetType::factor) {
      if (Arguments::given(offset_)) check_factor();
      return;
    }
    TORCH_CHECK(Arguments::given(offset_), args_.prefix(names_.offset), "expected a tensor with format ", format_.name,
                ", got none");
    const Tensor &scale = weight_.scale, &offset = weight_.offset = *offset_;
    args_.check_dense(names_.offset, offset);
    TORCH_CHECK(offset.scalar_type() == scale.scalar_type(), args_.prefix(names_.offset), "expected ",
                dtype_name(scale.scalar_type()), ", the dtype of ", names_.scale, "; got ",
                dtype_name(offset.scalar_type()));
    TORCH_CHECK(offset.sizes() == scale.sizes(), args_.prefix(names_.offset), "expected shape ", scale.sizes(),
                ", the shape of ", names_.scale, "; got ", offset.sizes());
  }

  // One factor per matrix.
  void check_factor() {
    const Tensor& factor = weight_.offset = *offset_;
    args_.check_dense(names_.offset, factor);
    TORCH_CHECK(factor.scalar_type() == at::kFloat, args_.prefix(names_.offset), "expected float32 in format ",
                format_.name, ", got ", dtype_name(factor.scalar_type()));
    const auto matrices = weight_.data.sizes().slice(0, weight_.data.dim() - 2);
    auto expected = matrices.vec();
    expected.push_back(1);
    TORCH_CHECK(factor.sizes() == expected, args_.prefix(names_.offset), "expected shape ", at::IntArrayRef(expected),
                ", a factor for each matrix of ", names_.data, "; got ", factor.sizes());
  }

  Arguments& args_;
  const WeightNames& names_;
  const OptionalTensor &scale_, &offset_;
  const Format& format_;
  const int64_t group_size_;
  Weight weight_;
};

inline const Format& Arguments::format(const char* name, std::string_view value) const {
  if (const Format* found = find_format(value)) return *found;
  std::string all, last;
  for (const Format& each : kFormats) {
    if (each.name != last) all += std::string(all.empty() ? "" : ", ") + std::string(each.name);
    last = each.name;
  }
  TORCH_CHECK(false, prefix(name), "expected one of ", all, "; got ", quoted(value));
}

inline Weight Arguments::weight(const WeightNames& names, const Tensor& data, const OptionalTensor& scale,
                                const OptionalTensor& offset, const Format& format, int64_t group_size,
                                bool transposed) {
  if (!format.is_dense()) {
    TORCH_CHECK(!transposed, prefix("transposed"), "expected False with format ", format.name, ", got True");
    return PackedWeight(*this, names, data, scale, offset, format, group_size).checked();
  }
  TORCH_CHECK(group_size == 0, prefix("group_size"), "expected 0 with format dense, got ", group_size);
  TORCH_CHECK(!given(scale), prefix(names.scale), "expected none with format dense, got a tensor");
  TORCH_CHECK(!given(offset), prefix(names.offset), "expected none with format dense, got a tensor");
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
