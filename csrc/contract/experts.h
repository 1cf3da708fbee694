// The checks and outputs of glu and experts. csrc/ops.h says how contracts are written.
#pragma once
#include <limits>
#include <optional>
#include <string_view>

#include "arguments.h"
#include "common.h"
#include "weight.h"

// The activation options in a schema.
#define MOE_METAL_ACTIVATION "str activation='silu', float alpha=1.702, float? limit=None"

namespace moe_metal {

inline ActivationParams activation_params(const Arguments& args, std::string_view activation, double alpha,
                                          std::optional<double> limit) {
  const float used_limit = limit ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
  TORCH_CHECK(used_limit > 0, args.prefix("limit"), "expected a number > 0 or None, got ",
              Arguments::as_float32(*limit));
  return {
      .activation = args.one_of<Activation>("activation", activation),
      .alpha = args.finite("alpha", alpha),
      .limit = used_limit,
  };
}

struct Glu {
  Tensor gate, up;  // any strides: two halves or interleaved views of one packed tensor
  ActivationParams params;
  int64_t rows, I;
  Tensor output;

  bool is_empty() const { return rows == 0; }
  Tensor outputs() const { return output; }
};

inline constexpr char schema_glu[] = "(Tensor gate, Tensor up, *, " MOE_METAL_ACTIVATION ") -> Tensor";
inline Glu check_glu(const Tensor& gate, const Tensor& up, std::string_view activation, double alpha,
                     std::optional<double> limit) {
  Arguments args("glu", "gate", gate);
  Glu call;
  call.gate = args.activation("gate", gate, "*I");
  call.up = args.activation("up", up, "*I");
  args.at_least_one('I', "gate");
  call.params = activation_params(args, activation, alpha, limit);
  call.rows = args.tokens();
  call.I = args['I'];
  call.output = args.output(call.I);
  return call;
}

struct Experts {
  Tensor x, weights, ids, gate_up_bias, down_bias, shared, shared_gate, residual;
  Weight gate_up, down;
  // Row i of gate is row i * row_stride of gate_up; its up row is `up_row_offset` rows further.
  int64_t row_stride, up_row_offset;
  int64_t bias_stride, up_bias_offset;  // the same for the biases, whose layout may differ
  ActivationParams params;
  int64_t T, E, K, H, I;
  Tensor output;

  bool is_empty() const { return T == 0; }
  Tensor outputs() const { return output; }
};

// The weights of experts, not yet checked.
struct ExpertsWeights {
  const Tensor &gate_up, &down;
  const OptionalTensor &gate_up_scale, &gate_up_offset, &down_scale, &down_offset;
  std::string_view format;
  std::optional<std::string_view> down_format;  // if it differs from `format`
  int64_t group_size;
  bool interleaved, transposed;

  // gate and up are separate matrices.
  bool are_separate(const Format& format) const {
    return gate_up.defined() && gate_up.dim() == 4 && format.scale == ScaleType::none;
  }
};

inline Weight check_gate_up(Arguments& args, const ExpertsWeights& given, const Format& format) {
  const Tensor& data = given.gate_up;
  const bool separate = given.are_separate(format);
  const WeightNames names = {"gate_up", "gate_up_scale", "gate_up_offset", separate ? "EIH" : "EGH"};
  const auto checked = [&](const Tensor& data) {
    return args.weight(names, data, given.gate_up_scale, given.gate_up_offset, format, given.group_size,
                       given.transposed);
  };
  if (!separate) return checked(data);
  TORCH_CHECK(data.size(1) == 2 && !given.transposed, args.prefix("gate_up"),
              "expected gate and up, [E, 2, I, ...], where it has 4 dimensions, and no `transposed`; got shape ",
              data.sizes());
  Weight weight = checked(data.select(1, 0));
  const int64_t size = format.is_dense() ? 1 : data.element_size();
  weight.half = weight.rows;
  weight.gap = data.stride(1) * size - weight.rows * weight.row;
  weight.rows *= 2;
  args.bind('G', weight.rows);
  return weight;
}

inline Weight check_down(Arguments& args, const ExpertsWeights& given, const Format& format) {
  const Weight weight = args.weight({"down", "down_scale", "down_offset", "EHI"}, given.down, given.down_scale,
                                    given.down_offset, format, given.group_size, given.transposed);
  args.in_range("down", args['I'], 1, std::numeric_limits<int64_t>::max() / 2, "its inner size, I");
  args.in_range("down", args['E'], 1, kMaxExperts, "its number of experts, E");
  return weight;
}

inline void check_experts_weights(Arguments& args, const ExpertsWeights& given, Experts& call) {
  const Format& format = args.format("format", given.format);
  const Format& down_format = given.down_format ? args.format("down_format", *given.down_format) : format;
  if (down_format.is_dense()) {
    call.down = check_down(args, given, down_format);
    args.bind('G', 2 * args['I']);
    call.gate_up = check_gate_up(args, given, format);
  } else {  // I is a packed dimension of down, so it follows from the rows of gate_up
    call.gate_up = check_gate_up(args, given, format);
    TORCH_CHECK(args['G'] % 2 == 0, args.prefix("gate_up"), "expected an even number of rows, 2I; got ", args['G']);
    args.bind('I', args['G'] / 2);
    call.down = check_down(args, given, down_format);
  }
  const bool alternate = given.interleaved && !given.are_separate(format);
  call.row_stride = alternate ? 2 : 1;
  call.up_row_offset = alternate ? 1 : args['I'];
  call.bias_stride = given.interleaved ? 2 : 1;
  call.up_bias_offset = given.interleaved ? 1 : args['I'];
}

inline constexpr char schema_experts[] =
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, Tensor? shared=None, Tensor? shared_gate=None, Tensor? residual=None, "
    "Tensor? gate_up_scale=None, Tensor? gate_up_offset=None, Tensor? down_scale=None, Tensor? down_offset=None, "
    "*, " MOE_METAL_ACTIVATION
    ", bool interleaved=False, bool transposed=False, str format='dense', "
    "str? down_format=None, int group_size=0) -> Tensor";
inline Experts check_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                             const Tensor& down, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             const OptionalTensor& shared, const OptionalTensor& shared_gate,
                             const OptionalTensor& residual, const OptionalTensor& gate_up_scale,
                             const OptionalTensor& gate_up_offset, const OptionalTensor& down_scale,
                             const OptionalTensor& down_offset, std::string_view activation, double alpha,
                             std::optional<double> limit, bool interleaved, bool transposed, std::string_view format,
                             std::optional<std::string_view> down_format, int64_t group_size) {
  Arguments args("experts", "x", x);
  Experts call;
  call.x = args.activation("x", x, "*H");
  args.at_least_one('H', "x");
  call.weights = args.parameter("weights", weights, "*K");
  call.ids = args.ids("ids", ids, "*K");
  args.at_least_one('K', "ids");
  check_experts_weights(args,
                        {gate_up, down, gate_up_scale, gate_up_offset, down_scale, down_offset, format, down_format,
                         group_size, interleaved, transposed},
                        call);
  call.gate_up_bias = args.parameter("gate_up_bias", gate_up_bias, "EG");
  call.down_bias = args.parameter("down_bias", down_bias, "EH");
  call.shared = args.activation("shared", shared, "*H");
  call.shared_gate = args.parameter("shared_gate", shared_gate, "*");
  TORCH_CHECK(!call.shared_gate.defined() || call.shared.defined(), args.prefix("shared_gate"),
              "expected `shared` as well, got none");
  call.residual = args.activation("residual", residual, "*H");
  call.params = activation_params(args, activation, alpha, limit);
  make_contiguous({&call.x, &call.weights, &call.ids, &call.gate_up_bias, &call.down_bias, &call.shared,
                   &call.shared_gate, &call.residual});
  call.T = args.tokens();
  call.E = args['E'];
  call.K = args['K'];
  call.H = args['H'];
  call.I = args['I'];
  call.output = args.output(call.H);
  return call;
}

}  // namespace moe_metal
