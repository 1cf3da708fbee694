// The checks and the outputs of every op, shared by both backends.
//
// Each op has a struct of its checked arguments and a function template of the same name, which fills the struct and
// calls the backend's `run`, unless there are no tokens. Tensors in the struct are contiguous (weights are never
// copied: the struct has their strides), absent optional tensors are undefined, and outputs are allocated.
// arguments.h explains the shape letters.
#pragma once
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "common.h"
#include "weight.h"

namespace moe_metal {

// To be called after all checks: the copy of an expanded tensor of a wrong shape could exceed the memory.
inline void make_contiguous(std::initializer_list<Tensor*> tensors) {
  for (Tensor* tensor : tensors) {
    if (tensor->defined()) *tensor = tensor->contiguous();
  }
}

// ---------------------------------------------------------------------------------------------- router

// The routing options of a call, not yet checked.
struct RoutingOptions {
  int64_t top_k;
  std::string_view scoring, renormalize;
  int64_t n_group, topk_group;
  std::string_view group_score;
  double scaling_factor, softcap;
};

inline RoutingParams routing_params(const Arguments& args, const RoutingOptions& options) {
  const int64_t E = args['E'];
  args.in_range("E", E, 1, kMaxExperts, "the number of experts");
  args.in_range("top_k", options.top_k, 1, E, "E");
  args.in_range("n_group", options.n_group, 1, E, "E");
  TORCH_CHECK(E % options.n_group == 0, args.prefix("n_group"), "expected a divisor of E = ", E, ", got ",
              options.n_group);
  args.in_range("topk_group", options.topk_group, 1, options.n_group, "n_group");
  args.in_range("top_k", options.top_k, 1, E / options.n_group * options.topk_group,
                "the experts in topk_group groups");
  return {
      .experts = static_cast<int32_t>(E),
      .top_k = static_cast<int32_t>(options.top_k),
      .n_group = static_cast<int32_t>(options.n_group),
      .topk_group = static_cast<int32_t>(options.topk_group),
      .scoring = args.one_of<Scoring>("scoring", options.scoring),
      .renormalize = args.one_of<Renormalize>("renormalize", options.renormalize),
      .group_score = args.one_of<GroupScore>("group_score", options.group_score),
      .scaling_factor = args.finite("scaling_factor", options.scaling_factor),
      .softcap = args.softcap("softcap", options.softcap),
  };
}

struct Route {
  Tensor logits, select_bias, per_expert_scale;
  RoutingParams params;
  int64_t T;
  Tensor weights, ids;
};

template <auto run>
std::tuple<Tensor, Tensor> route(const Tensor& logits, const OptionalTensor& select_bias,
                                 const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                 std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                 std::string_view group_score, double scaling_factor, double softcap) {
  Arguments args("route", "logits", logits);
  Route call;
  call.logits = args.activation("logits", logits, "*E");
  call.select_bias = args.parameter("select_bias", select_bias, "E");
  call.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  call.params =
      routing_params(args, {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap});
  make_contiguous({&call.logits, &call.select_bias, &call.per_expert_scale});
  call.T = args.tokens();
  call.weights = args.output(top_k, at::kFloat);
  call.ids = args.output(top_k, at::kInt);
  if (call.T > 0) run(call);
  return {call.weights, call.ids};
}

struct Gate {
  Tensor hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale;
  RoutingParams params;
  float eps;
  int64_t T, H;
  Tensor weights, ids;
};

template <auto run>
std::tuple<Tensor, Tensor> gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                                const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                                const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                std::string_view group_score, double scaling_factor, double softcap, double eps) {
  Arguments args("gate", "hidden", hidden);
  Gate call;
  call.hidden = args.activation("hidden", hidden, "*H");
  args.at_least_one('H', "hidden");
  call.router_weight = args.parameter("router_weight", router_weight, "EH");
  call.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  call.router_bias = args.parameter("router_bias", router_bias, "E");
  call.select_bias = args.parameter("select_bias", select_bias, "E");
  call.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  call.params =
      routing_params(args, {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap});
  call.eps = args.not_negative("eps", eps);
  make_contiguous({&call.hidden, &call.router_weight, &call.norm_weight, &call.router_bias, &call.select_bias,
                   &call.per_expert_scale});
  call.T = args.tokens();
  call.H = args['H'];
  call.weights = args.output(top_k, at::kFloat);
  call.ids = args.output(top_k, at::kInt);
  if (call.T > 0) run(call);
  return {call.weights, call.ids};
}

// ---------------------------------------------------------------------------------------------- experts

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
};

template <auto run>
Tensor glu(const Tensor& gate, const Tensor& up, std::string_view activation, double alpha,
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
  if (call.rows > 0) run(call);
  return call.output;
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
};

struct ExpertsWeights {
  const Tensor &gate_up, &down;
  const OptionalTensor &gate_up_scale, &gate_up_offset, &down_scale, &down_offset;
  std::string_view format;
  std::optional<std::string_view> down_format;  // if it differs from `format`
  int64_t group_size;
  bool interleaved, transposed;
};

inline void experts_weights(Arguments& args, const ExpertsWeights& given, Experts& call) {
  const Format& format = args.format("format", given.format);
  const Format& down_format = given.down_format ? args.format("down_format", *given.down_format) : format;
  const bool apart = given.gate_up.defined() && given.gate_up.dim() == 4 && format.scale == ScaleType::none;
  const auto gate_up = [&] {
    const WeightNames names = {"gate_up", "gate_up_scale", "gate_up_offset", apart ? "EIH" : "EGH"};
    const auto weight = [&](const Tensor& data) {
      return args.weight(names, data, given.gate_up_scale, given.gate_up_offset, format, given.group_size,
                         given.transposed);
    };
    if (!apart) {
      call.gate_up = weight(given.gate_up);
      return;
    }
    const Tensor& data = given.gate_up;
    TORCH_CHECK(data.size(1) == 2 && !given.transposed, args.prefix("gate_up"),
                "expected gate and up, [E, 2, I, ...], where it has 4 dimensions, and no `transposed`; got shape ",
                data.sizes());
    call.gate_up = weight(data.select(1, 0));
    const int64_t size = format.is_dense() ? 1 : data.element_size();
    call.gate_up.half = call.gate_up.rows;
    call.gate_up.gap = data.stride(1) * size - call.gate_up.rows * call.gate_up.row;
    call.gate_up.rows *= 2;
    args.bind('G', call.gate_up.rows);
  };
  const auto down = [&] {
    call.down = args.weight({"down", "down_scale", "down_offset", "EHI"}, given.down, given.down_scale,
                            given.down_offset, down_format, given.group_size, given.transposed);
    args.in_range("down", args['I'], 1, std::numeric_limits<int64_t>::max() / 2, "its inner size, I");
    args.in_range("down", args['E'], 1, kMaxExperts, "its number of experts, E");
  };
  if (down_format.is_dense()) {
    down();
    args.bind('G', 2 * args['I']);
    gate_up();
  } else {  // I is a packed dimension of down, so it follows from the rows of gate_up
    gate_up();
    TORCH_CHECK(args['G'] % 2 == 0, args.prefix("gate_up"), "expected an even number of rows, 2I; got ", args['G']);
    args.bind('I', args['G'] / 2);
    down();
  }
  const bool in_turn = given.interleaved && !apart;
  call.row_stride = in_turn ? 2 : 1;
  call.up_row_offset = in_turn ? 1 : args['I'];
  call.bias_stride = given.interleaved ? 2 : 1;
  call.up_bias_offset = given.interleaved ? 1 : args['I'];
}

template <auto run>
Tensor experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up, const Tensor& down,
               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, const OptionalTensor& shared,
               const OptionalTensor& shared_gate, const OptionalTensor& residual, const OptionalTensor& gate_up_scale,
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
  experts_weights(args,
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
  if (call.T > 0) run(call);
  return call.output;
}

// ---------------------------------------------------------------------------------------------- weights alone

struct Linear {
  Tensor x, bias;
  Weight weight;
  int64_t T, N, H;
  Tensor output;
};

template <auto run>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& offset,
              const OptionalTensor& bias, std::string_view format, int64_t group_size) {
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
  if (call.T > 0) run(call);
  return call.output;
}

struct Dequantize {
  Weight weight;  // any number of leading dimensions; the last of them is the "expert"
  Tensor output;
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

// The backends handle a matrix or a stack of matrices. With more dimensions, they get one stack after the other.
template <auto run>
void run_stacks(const Dequantize& call) {
  if (call.output.dim() <= 3) return run(call);
  for (int64_t i = 0; i < call.output.size(0); ++i) {
    Dequantize part = call;
    for (Tensor* tensor : {&part.weight.data, &part.weight.scale, &part.weight.offset, &part.output}) {
      if (tensor->defined()) *tensor = tensor->select(0, i);
    }
    run_stacks<run>(part);
  }
}

template <auto run>
Tensor dequantize(const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& offset,
                  std::string_view format, int64_t bits, at::ScalarType dtype) {
  Arguments args("dequantize", "weight", weight, dtype);
  const Format& used = args.format("format", format);
  const int64_t columns = packed_columns(args, weight, scale, used, bits);
  if (columns >= 0) args.bind('C', columns);
  Dequantize call;
  call.weight = args.weight({"weight", "scale", "offset", "*NC"}, weight, scale, offset, used);
  call.output = args.output({call.weight.rows, call.weight.columns}, dtype);
  if (call.output.numel() > 0) run_stacks<run>(call);
  return call.output;
}

// ---------------------------------------------------------------------------------------------- combine and norm

// A tensor that is written in place. The kernel writes `work`; done() copies it back if the strides forced a copy.
struct InPlace {
  Tensor target, work;
  void done() const {
    if (!work.is_same(target)) target.copy_(work);
  }
};

// The five weighted sums share their arguments; each uses the tensors that its schema has.
struct WeightedSum {
  Tensor slots, weights;
  Tensor shared, shared_gate, residual;
  Tensor norm_weight, residual_norm_weight;
  float eps = 0;
  int64_t T = 0, K = 0, H = 0;
  Tensor output;     // undefined for weighted_sum_residual_
  InPlace in_place;  // only of ops whose names end in _
};

inline WeightedSum weighted_sum_inputs(Arguments& args, const Tensor& slots, const Tensor& weights) {
  WeightedSum sum;
  sum.slots = args.activation("slots", slots, "*KH");
  sum.weights = args.parameter("weights", weights, "*K");
  sum.T = args.tokens();
  sum.K = args['K'];
  sum.H = args['H'];
  args.at_least_one('K', "slots");
  args.at_least_one('H', "slots");
  return sum;
}

inline void make_contiguous(WeightedSum& sum) {
  make_contiguous({&sum.slots, &sum.weights, &sum.shared, &sum.shared_gate, &sum.residual, &sum.norm_weight,
                   &sum.residual_norm_weight});
}

template <auto run>
Tensor weighted_sum(const Tensor& slots, const Tensor& weights, const OptionalTensor& shared,
                    const OptionalTensor& shared_gate, const OptionalTensor& residual) {
  Arguments args("weighted_sum", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.shared = args.activation("shared", shared, "*H");
  sum.shared_gate = args.parameter("shared_gate", shared_gate, "*");
  TORCH_CHECK(!sum.shared_gate.defined() || sum.shared.defined(), args.prefix("shared_gate"),
              "expected `shared` as well, got none");
  sum.residual = args.activation("residual", residual, "*H");
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  if (sum.T > 0) run(sum);
  return sum.output;
}

// Whether two elements share memory. PyTorch's own check does not decide this for most tensors that are not dense.
inline bool overlaps_itself(const Tensor& tensor) {
  const auto overlap = at::has_internal_overlap(tensor);
  if (overlap != at::MemOverlap::TooHard) return overlap == at::MemOverlap::Yes;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) steps.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(steps.begin(), steps.end());
  int64_t span = 0;  // distance from the first element to the last, in the dimensions so far
  const bool nested = std::all_of(steps.begin(), steps.end(), [&](const auto& step) {
    const bool beyond = step.first > span;
    span += step.first * (step.second - 1);
    return beyond;
  });
  if (nested) return false;
  // Rare, since slices and transposed tensors are nested.
  std::vector<int64_t> offsets = {0};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const size_t before = offsets.size();
    for (int64_t i = 1; i < tensor.size(d); ++i) {
      for (size_t j = 0; j < before; ++j) offsets.push_back(offsets[j] + i * tensor.stride(d));
    }
  }
  std::sort(offsets.begin(), offsets.end());
  return std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end();
}

inline InPlace in_place(const Arguments& args, const Tensor& target, std::initializer_list<const Tensor*> inputs) {
  TORCH_CHECK(!overlaps_itself(target), args.prefix("residual"),
              "expected a tensor whose elements have memory of their own, got one in which some share theirs; pass "
              "residual.clone()");
  for (const Tensor* input : inputs) {
    const auto overlap = at::get_overlap_status(target, *input);
    TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
                args.prefix("residual"), "expected memory that no other argument uses, got a tensor that overlaps one");
  }
  return {target, target.contiguous()};
}

template <auto run>
void weighted_sum_residual_(const Tensor& residual, const Tensor& slots, const Tensor& weights) {
  Arguments args("weighted_sum_residual_", "residual", residual);
  args.activation("residual", residual, "*H");
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.in_place = in_place(args, residual, {&slots, &weights});
  sum.residual = sum.in_place.work;
  make_contiguous(sum);
  if (sum.T > 0) run(sum);
  sum.in_place.done();
}

template <auto run>
Tensor weighted_sum_residual_norm_(const Tensor& residual, const Tensor& slots, const Tensor& weights,
                                   const Tensor& norm_weight, double eps) {
  Arguments args("weighted_sum_residual_norm_", "residual", residual);
  args.activation("residual", residual, "*H");
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  sum.in_place = in_place(args, residual, {&slots, &weights, &norm_weight});
  sum.residual = sum.in_place.work;
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  if (sum.T > 0) run(sum);
  sum.in_place.done();
  return sum.output;
}

template <auto run>
Tensor weighted_sum_norm_add(const Tensor& slots, const Tensor& weights, const Tensor& residual,
                             const Tensor& norm_weight, double eps) {
  Arguments args("weighted_sum_norm_add", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.residual = args.activation("residual", residual, "*H");
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  if (sum.T > 0) run(sum);
  return sum.output;
}

template <auto run>
Tensor weighted_sum_dual_norm_add(const Tensor& slots, const Tensor& weights, const Tensor& residual,
                                  const Tensor& residual_norm_weight, const Tensor& moe_norm_weight, double eps) {
  Arguments args("weighted_sum_dual_norm_add", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.residual = args.activation("residual", residual, "*H");
  sum.residual_norm_weight = args.parameter("residual_norm_weight", residual_norm_weight, "H");
  sum.norm_weight = args.parameter("moe_norm_weight", moe_norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  if (sum.T > 0) run(sum);
  return sum.output;
}

// The arguments of norm_add and residual_norm. norm has neither a residual nor a scalar.
struct ResidualNorm {
  Tensor residual, input;
  Tensor weight;  // may be undefined in norm
  Tensor scalar;  // undefined, [1] or [H]
  float eps;
  int64_t T, H;
  Tensor output;
  Tensor sum;  // residual_norm only
};

inline ResidualNorm residual_norm_inputs(const char* op, const Tensor& residual, const Tensor& input,
                                         const Tensor& weight, const OptionalTensor& scalar, double eps) {
  Arguments args(op, "residual", residual);
  ResidualNorm call;
  call.residual = args.activation("residual", residual, "*H");
  args.at_least_one('H', "residual");
  call.input = args.activation("input", input, "*H");
  call.weight = args.parameter("weight", weight, "H");
  const bool single = scalar.has_value() && scalar->defined() && scalar->dim() == 1 && scalar->size(0) == 1;
  if (single) args.bind('U', 1);
  call.scalar = args.parameter("scalar", scalar, single ? "U" : "H");
  call.eps = args.not_negative("eps", eps);
  make_contiguous({&call.residual, &call.input, &call.weight, &call.scalar});
  call.T = args.tokens();
  call.H = args['H'];
  call.output = args.output(call.H);
  return call;
}

template <auto run>
Tensor norm(const Tensor& input, const OptionalTensor& weight, double eps) {
  Arguments args("norm", "input", input);
  ResidualNorm call;
  call.input = args.activation("input", input, "*H");
  args.at_least_one('H', "input");
  call.weight = args.parameter("weight", weight, "H");
  call.eps = args.not_negative("eps", eps);
  make_contiguous({&call.input, &call.weight});
  call.T = args.tokens();
  call.H = args['H'];
  call.output = args.output(call.H);
  if (call.T > 0) run(call);
  return call.output;
}

template <auto run>
Tensor norm_add(const Tensor& residual, const Tensor& input, const Tensor& weight, const OptionalTensor& scalar,
                double eps) {
  ResidualNorm call = residual_norm_inputs("norm_add", residual, input, weight, scalar, eps);
  if (call.T > 0) run(call);
  return call.output;
}

template <auto run>
std::tuple<Tensor, Tensor> residual_norm(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& scalar, double eps) {
  ResidualNorm call = residual_norm_inputs("residual_norm", residual, input, weight, scalar, eps);
  call.sum = empty(call.output.sizes(), call.output.options());
  if (call.T > 0) run(call);
  return {call.output, call.sum};
}

// ---------------------------------------------------------------------------------------------- rope and attention

// Queries or keys. They are not copied, so they may have any strides.
struct RopeHeads {
  Tensor input;        // [B, T, heads, D]
  Tensor norm_weight;  // undefined, [D] or [heads, D], contiguous: float32 or the dtype of q
  int64_t heads;
  Tensor output;  // [B, heads, T, D]

  bool norms_all() const { return norm_weight.defined() && norm_weight.dim() == 2; }
};

struct Rope {
  RopeHeads q, k;
  Tensor cos, sin;  // [B, T, R] of any strides, the first of which may be 0: float32 or the dtype of q
  float eps;
  bool interleaved;
  int64_t B, T, D, R;
};

template <auto run>
std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                const OptionalTensor& q_norm_weight, const OptionalTensor& k_norm_weight, double eps,
                                bool interleaved) {
  Arguments args("rope", "q", q);
  Rope call;
  const auto norm_weight = [&](const char* name, const OptionalTensor& weight, const char* all_heads) {
    return args.parameter(name, weight, Arguments::given(weight) && weight->dim() == 2 ? all_heads : "D");
  };
  call.q.input = args.activation("q", q, "BTAD");
  args.at_least_one('A', "q");
  args.in_range("q", args['D'], 2, std::numeric_limits<int64_t>::max(), "its size of a head, D");
  call.k.input = args.activation("k", k, "BTJD");
  args.at_least_one('J', "k");
  call.cos = args.angles("cos", cos, "BTR");
  call.sin = args.angles("sin", sin, "BTR");
  args.in_range("cos", args['R'], 1, args['D'] / 2, "the pairs of a head, R");
  call.q.norm_weight = norm_weight("q_norm_weight", q_norm_weight, "AD");
  call.k.norm_weight = norm_weight("k_norm_weight", k_norm_weight, "JD");
  call.eps = args.not_negative("eps", eps);
  call.interleaved = interleaved;
  make_contiguous({&call.q.norm_weight, &call.k.norm_weight});
  std::tie(call.B, call.T, call.D, call.R) = std::tuple(args['B'], args['T'], args['D'], args['R']);
  std::tie(call.q.heads, call.k.heads) = std::tuple(args['A'], args['J']);
  for (RopeHeads* heads : {&call.q, &call.k}) heads->output = args.output({call.B, heads->heads, call.T, call.D});
  if (call.q.output.numel() > 0) run(call);
  return {call.q.output, call.k.output};
}

// q, k, v and mask are not copied, so they may have any strides. A broadcast mask has strides of 0.
struct Attention {
  Tensor q, k, v;
  Tensor mask;   // undefined, or [B, A, T, S]: bool, or float32 or the dtype of q
  Tensor sinks;  // undefined, or [A], contiguous: float32 or the dtype of q
  int64_t B, A, J, T, S, D, V;
  float scale, softcap;
  bool causal;
  int64_t window;  // 0: none; at most S
  Tensor output;   // [B, T, A, V]

  // Query t sees keys [first_key(t), last_key(t)), unless the mask excludes them.
  int64_t first_key(int64_t t) const { return window > 0 ? std::max<int64_t>(S - T + t + 1 - window, 0) : 0; }
  int64_t last_key(int64_t t) const { return causal ? std::clamp<int64_t>(S - T + t + 1, 0, S) : S; }
};

template <auto run>
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                 const OptionalTensor& sinks, std::optional<double> scale, bool causal, int64_t window,
                 double softcap) {
  Arguments args("attention", "q", q);
  Attention call;
  call.q = args.activation("q", q, "BATD");
  args.at_least_one('A', "q");
  args.at_least_one('D', "q");
  call.k = args.activation("k", k, "BJSD");
  args.at_least_one('J', "k");
  TORCH_CHECK(args['A'] % args['J'] == 0, args.prefix("k"), "expected J to be a divisor of A = ", args['A'], ", got ",
              args['J']);
  call.v = args.activation("v", v, "BJSV");
  args.at_least_one('V', "v");
  call.mask = args.mask("mask", mask, "BATS");
  call.sinks = args.parameter("sinks", sinks, "A");
  call.scale = args.finite("scale", scale.value_or(1 / std::sqrt(static_cast<double>(args['D']))));
  TORCH_CHECK(window >= 0, args.prefix("window"), "expected a number >= 0, got ", window);
  TORCH_CHECK(window == 0 || causal, args.prefix("window"), "expected 0 where causal is False, got ", window);
  call.softcap = args.softcap("softcap", softcap);
  call.causal = causal;
  make_contiguous({&call.sinks});
  std::tie(call.B, call.A, call.J) = std::tuple(args['B'], args['A'], args['J']);
  std::tie(call.T, call.S, call.D, call.V) = std::tuple(args['T'], args['S'], args['D'], args['V']);
  call.window = std::min(window, call.S);
  call.output = args.output({call.B, call.T, call.A, call.V});
  if (call.output.numel() > 0) run(call);
  return call.output;
}

}  // namespace moe_metal
