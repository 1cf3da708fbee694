// The checks and outputs of short_conv_. csrc/ops.h says how contracts are written.
#pragma once
#include <limits>
#include <tuple>

#include "contract/in_place.h"

namespace moe_metal {

struct ShortConv {
  Tensor x, input_gate, output_gate;  // [B, T, C] of any strides; gates may be undefined
  Tensor weight, bias;                // [C, W] and [C], contiguous; bias may be undefined
  Tensor past, kept;                  // [B, (W - 1) dilation, C] and [B, R, C] of any strides, or undefined
  int64_t B, T, C, W, R, dilation;
  Pointwise activation;
  Tensor output;  // [B, T, C]

  int64_t before() const { return (W - 1) * dilation; }
  bool is_empty() const { return B == 0 || C == 0 || (T == 0 && R == 0); }
  Tensor outputs() const { return output; }
};

inline constexpr char schema_short_conv_[] =
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? input_gate=None, Tensor? output_gate=None, "
    "Tensor? past=None, Tensor(a!)? kept=None, *, str activation='none', int dilation=1) -> Tensor";
inline ShortConv check_short_conv_(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& input_gate, const OptionalTensor& output_gate,
                                   const OptionalTensor& past, const OptionalTensor& kept, std::string_view activation,
                                   int64_t dilation) {
  Arguments args("short_conv_", "x", x);
  ShortConv call;
  call.x = args.activation("x", x, "BTC");
  call.weight = args.parameter("weight", weight, "CW");
  args.at_least_one('W', "weight");
  call.bias = args.parameter("bias", bias, "C");
  call.input_gate = args.activation("input_gate", input_gate, "BTC");
  call.output_gate = args.activation("output_gate", output_gate, "BTC");
  TORCH_CHECK(1 <= dilation && dilation <= std::numeric_limits<int32_t>::max(), args.prefix("dilation"),
              "expected a number from 1 to 2^31 - 1, got ", dilation);
  std::tie(call.B, call.T, call.C, call.W) = std::tuple(args['B'], args['T'], args['C'], args['W']);
  call.dilation = dilation;
  args.bind('P', call.before());
  call.past = args.activation("past", past, "BPC");
  call.kept = args.activation("kept", kept, "BRC");
  call.R = call.kept.defined() ? args['R'] : 0;
  TORCH_CHECK(call.R <= call.before() + call.T, args.prefix("kept"), "expected at most ", call.before() + call.T,
              " rows, R, got ", call.R);
  call.activation = args.one_of<Pointwise>("activation", activation);
  if (call.kept.defined()) {
    check_own_memory(args, "kept", call.kept);
    for (const Tensor* other : {&call.x, &call.weight, &call.bias, &call.input_gate, &call.output_gate, &call.past}) {
      if (other->defined()) check_apart(args, "kept", call.kept, *other);
    }
  }
  make_contiguous({&call.weight, &call.bias});
  call.output = args.output({call.B, call.T, call.C});
  return call;
}

}  // namespace moe_metal
