// The checks and outputs of the ops on one weight: linear and dequantize. csrc/ops.h says how contracts are written.
#pragma once
#include <string_view>

#include "arguments.h"
#include "weight.h"

namespace moe_metal {

struct Linear {
  Tensor x, bias;
  Weight weight;
  int64_t T, N, H;
  int64_t heads = 1;  // more: x is [T, heads, H] of any strides but the last, and each head has a matrix of its own
  Tensor output;

  bool is_empty() const { return T == 0; }
  Tensor outputs() const { return output; }

  // Between the rows of x, in elements.
  int64_t token_stride() const { return heads > 1 ? x.stride(0) : H; }
  int64_t head_stride() const { return heads > 1 ? x.stride(1) : 0; }
};

inline constexpr char schema_linear[] =
    "(Tensor x, Tensor weight, Tensor? scale=None, Tensor? offset=None, Tensor? bias=None, *, "
    "str format='dense', int group_size=0) -> Tensor";
inline Linear check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                           const OptionalTensor& offset, const OptionalTensor& bias, std::string_view format,
                           int64_t group_size) {
  Arguments args("linear", "x", x);
  Linear call;
  call.x = args.activation("x", x, "*H");
  args.at_least_one('H', "x");
  call.weight = args.weight({"weight", "scale", "offset", "NH"}, weight, scale, offset, args.format("format", format),
                            group_size);
  args.at_least_one('N', "weight");
  call.bias = args.parameter("bias", bias, "N");
  make_contiguous({&call.x, &call.bias});
  call.T = args.tokens();
  call.N = args['N'];
  call.H = args['H'];
  call.output = args.output(call.N);
  return call;
}

struct Dequantize {
  Weight weight;  // any number of leading dimensions; the last of them is the "expert"
  Tensor output;

  bool is_empty() const { return output.numel() == 0; }
  Tensor outputs() const { return output; }
};

// The columns of a packed weight, which no other argument determines. Later checks report sizes that do not fit.
inline int64_t packed_columns(const Arguments& args, const Tensor& weight, const OptionalTensor& scale,
                              const Format& format, int64_t bits) {
  args.check_given("weight", weight);
  if (weight.dim() == 0 || format.is_dense()) return -1;
  const Format* used = format.data == DataType::words ? find_format(format.name, bits) : &format;
  TORCH_CHECK(used, args.prefix("bits"), "expected ", affine_widths(), ", got ", bits);
  const bool blocks = format.columns == format.scale_columns && weight.dim() > 1 && Arguments::given(scale) &&
                      weight.dim() == scale->dim() + 1;
  const int64_t bytes = bounded_product({blocks ? weight.size(-2) : 1, weight.size(-1), weight.element_size()});
  return bounded_product({bytes, used->columns}) / used->bytes;
}

inline constexpr char schema_dequantize[] =
    "(Tensor weight, Tensor? scale=None, Tensor? offset=None, *, str format, int bits=4, "
    "ScalarType dtype) -> Tensor";
inline Dequantize check_dequantize(const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& offset,
                                   std::string_view format, int64_t bits, at::ScalarType dtype) {
  Arguments args("dequantize", "weight", weight, dtype);
  const Format& used = args.format("format", format);
  const int64_t columns = packed_columns(args, weight, scale, used, bits);
  if (columns >= 0) args.bind('C', columns);
  Dequantize call;
  call.weight = args.weight({"weight", "scale", "offset", "*NC"}, weight, scale, offset, used);
  call.output = args.output({call.weight.rows, call.weight.columns}, dtype);
  return call;
}

// Calls run(call) with a matrix or a stack of matrices: with more dimensions, for one stack after the other.
template <class Run>
void for_each_stack(const Dequantize& call, const Run& run) {
  if (call.output.dim() <= 3) return run(call);
  for (int64_t i = 0; i < call.output.size(0); ++i) {
    Dequantize part = call;
    for (Tensor* tensor : {&part.weight.data, &part.weight.scale, &part.weight.offset, &part.output}) {
      if (tensor->defined()) *tensor = tensor->select(0, i);
    }
    for_each_stack(part, run);
  }
}

}  // namespace moe_metal
