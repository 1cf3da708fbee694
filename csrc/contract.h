// What every op promises before any work: its checks and its outputs, once, for both backends.
//
// Each op has a struct of its checked arguments and a function checked_<op> that fills it. Tensors in it are contiguous
// (expert weights excepted: they are never copied, their strides are told), optional tensors are undefined when absent,
// and outputs are allocated. arguments.h says what the shape letters mean.
#pragma once
#include <ATen/MemoryOverlap.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>

#include "arguments.h"
#include "common.h"
#include "kept_memory.h"

namespace moe_metal {

// ---------------------------------------------------------------------------------------------- router

// The routing options as the user gives them.
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
  const float softcap = args.not_negative("softcap", options.softcap);
  TORCH_CHECK(softcap > 0 || options.softcap == 0, args.prefix("softcap"), "expected 0 or a finite number > 0, got ",
              Arguments::as_float32(options.softcap));
  return {
      .experts = static_cast<int32_t>(E),
      .top_k = static_cast<int32_t>(options.top_k),
      .n_group = static_cast<int32_t>(options.n_group),
      .topk_group = static_cast<int32_t>(options.topk_group),
      .scoring = args.one_of<Scoring>("scoring", options.scoring, std::array{"softmax", "sigmoid", "sqrt_softplus"}),
      .renormalize = args.one_of<Renormalize>("renormalize", options.renormalize,
                                              std::array{"none", "before_scale", "after_scale"}),
      .group_score = args.one_of<GroupScore>("group_score", options.group_score, std::array{"top2_sum", "max"}),
      .scaling_factor = args.finite("scaling_factor", options.scaling_factor),
      .softcap = softcap,
  };
}

struct Route {
  Tensor logits, select_bias, per_expert_scale;
  RoutingParams params;
  int64_t T;
  Tensor weights, ids;
};

inline Route checked_route(const Tensor& logits, const OptionalTensor& select_bias,
                           const OptionalTensor& per_expert_scale, const RoutingOptions& options) {
  Arguments args("route", "logits", logits);
  Route route;
  route.logits = args.activation("logits", logits, "*E");
  route.select_bias = args.parameter("select_bias", select_bias, "E");
  route.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  route.params = routing_params(args, options);
  route.T = args.tokens();
  route.weights = args.output(options.top_k, at::kFloat);
  route.ids = args.output(options.top_k, at::kInt);
  return route;
}

struct Gate {
  Tensor hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale;
  RoutingParams params;
  float eps;
  int64_t T, H;
  Tensor weights, ids;
};

inline Gate checked_gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                         const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                         const OptionalTensor& per_expert_scale, const RoutingOptions& options, double eps) {
  Arguments args("gate", "hidden", hidden);
  Gate gate;
  gate.hidden = args.activation("hidden", hidden, "*H");
  args.at_least_one('H', "hidden");
  gate.router_weight = args.parameter("router_weight", router_weight, "EH");
  gate.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  gate.router_bias = args.parameter("router_bias", router_bias, "E");
  gate.select_bias = args.parameter("select_bias", select_bias, "E");
  gate.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  gate.params = routing_params(args, options);
  gate.eps = args.not_negative("eps", eps);
  gate.T = args.tokens();
  gate.H = args['H'];
  gate.weights = args.output(options.top_k, at::kFloat);
  gate.ids = args.output(options.top_k, at::kInt);
  return gate;
}

// ---------------------------------------------------------------------------------------------- experts

inline ActivationParams activation_params(const Arguments& args, std::string_view activation, double alpha,
                                          std::optional<double> limit) {
  const float used_limit = limit ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
  TORCH_CHECK(used_limit > 0, args.prefix("limit"), "expected a number > 0 or None, got ",
              Arguments::as_float32(*limit));
  return {
      .activation = args.one_of<Activation>("activation", activation,
                                            std::array{"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"}),
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

inline Glu checked_glu(const Tensor& gate, const Tensor& up, std::string_view activation, double alpha,
                       std::optional<double> limit) {
  Arguments args("glu", "gate", gate);
  Glu glu;
  glu.gate = args.strided("gate", gate, "*I");
  glu.up = args.strided("up", up, "*I");
  args.at_least_one('I', "gate");
  glu.params = activation_params(args, activation, alpha, limit);
  glu.rows = args.tokens();
  glu.I = args['I'];
  glu.output = args.output(glu.I);
  return glu;
}

// Where a weight matrix of one expert lies: element (e, row, column) at e * expert + row * row + column * column.
// Both layouts and both ways of packing gate and up come down to these strides, so kernels know only this form.
struct WeightStrides {
  int64_t expert, row, column;
};

struct Experts {
  Tensor x, weights, ids, gate_up, down, gate_up_bias, down_bias, shared, shared_gate, residual;
  WeightStrides gate_up_strides, down_strides;  // gate_up's rows step from one gate row to the next
  int64_t up_offset;                            // from a gate row to its up row, in elements of gate_up
  int64_t bias_stride, bias_up_offset;          // the same for gate_up_bias
  ActivationParams params;
  int64_t T, E, K, H, I;
  Tensor output;
};

inline Experts checked_experts(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& gate_up,
                               const Tensor& down, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                               const OptionalTensor& shared, const OptionalTensor& shared_gate,
                               const OptionalTensor& residual, std::string_view activation, double alpha,
                               std::optional<double> limit, bool interleaved, bool transposed) {
  Arguments args("experts", "x", x);
  Experts call;
  call.x = args.activation("x", x, "*H");
  args.at_least_one('H', "x");
  call.weights = args.parameter("weights", weights, "*K");
  call.ids = args.ids("ids", ids, "*K");
  args.at_least_one('K', "ids");
  call.down = args.strided("down", down, transposed ? "EIH" : "EHI");
  args.at_least_one('I', "down");
  args.in_range("down", args['E'], 1, kMaxExperts, "its number of experts, E");
  args.bind('G', 2 * args['I']);
  call.gate_up = args.strided("gate_up", gate_up, transposed ? "EHG" : "EGH");
  call.gate_up_bias = args.parameter("gate_up_bias", gate_up_bias, "EG");
  call.down_bias = args.parameter("down_bias", down_bias, "EH");
  call.shared = args.activation("shared", shared, "*H");
  call.shared_gate = args.parameter("shared_gate", shared_gate, "*");
  TORCH_CHECK(!call.shared_gate.defined() || call.shared.defined(), args.prefix("shared_gate"),
              "expected `shared` beside it, got none");
  call.residual = args.activation("residual", residual, "*H");
  call.params = activation_params(args, activation, alpha, limit);
  call.T = args.tokens();
  call.E = args['E'];
  call.K = args['K'];
  call.H = args['H'];
  call.I = args['I'];
  const int row = transposed ? 2 : 1, column = transposed ? 1 : 2;
  const int64_t step = interleaved ? 2 : 1, up = interleaved ? 1 : call.I;
  call.gate_up_strides = {gate_up.stride(0), gate_up.stride(row) * step, gate_up.stride(column)};
  call.up_offset = gate_up.stride(row) * up;
  call.down_strides = {down.stride(0), down.stride(row), down.stride(column)};
  call.bias_stride = step;
  call.bias_up_offset = up;
  call.output = args.output(call.H);
  return call;
}

// ---------------------------------------------------------------------------------------------- combine and norm

// A tensor that is written in place. The kernel works on `work`; done() brings it back when its strides forced a copy.
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
  InPlace in_place;  // of the ops whose names end in _
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

inline WeightedSum checked_weighted_sum(const Tensor& slots, const Tensor& weights, const OptionalTensor& shared,
                                        const OptionalTensor& shared_gate, const OptionalTensor& residual) {
  Arguments args("weighted_sum", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.shared = args.activation("shared", shared, "*H");
  sum.shared_gate = args.parameter("shared_gate", shared_gate, "*");
  TORCH_CHECK(!sum.shared_gate.defined() || sum.shared.defined(), args.prefix("shared_gate"),
              "expected `shared` beside it, got none");
  sum.residual = args.activation("residual", residual, "*H");
  sum.output = args.output(sum.H);
  return sum;
}

inline InPlace in_place(const Arguments& args, const Tensor& target, std::initializer_list<const Tensor*> inputs) {
  TORCH_CHECK(at::has_internal_overlap(target) != at::MemOverlap::Yes, args.prefix("residual"),
              "expected a tensor whose elements have memory of their own, got an expanded one; pass residual.clone()");
  for (const Tensor* input : inputs) {
    const auto overlap = at::get_overlap_status(target, *input);
    TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
                args.prefix("residual"), "expected memory that no other argument uses, got a tensor that overlaps one");
  }
  return {target, target.contiguous()};
}

inline WeightedSum checked_weighted_sum_residual_(const Tensor& residual, const Tensor& slots, const Tensor& weights) {
  Arguments args("weighted_sum_residual_", "residual", residual);
  args.strided("residual", residual, "*H");
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.in_place = in_place(args, residual, {&slots, &weights});
  sum.residual = sum.in_place.work;
  return sum;
}

inline WeightedSum checked_weighted_sum_residual_norm_(const Tensor& residual, const Tensor& slots,
                                                       const Tensor& weights, const Tensor& norm_weight, double eps) {
  Arguments args("weighted_sum_residual_norm_", "residual", residual);
  args.strided("residual", residual, "*H");
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  sum.in_place = in_place(args, residual, {&slots, &weights, &norm_weight});
  sum.residual = sum.in_place.work;
  sum.output = args.output(sum.H);
  return sum;
}

inline WeightedSum checked_weighted_sum_norm_add(const Tensor& slots, const Tensor& weights, const Tensor& residual,
                                                 const Tensor& norm_weight, double eps) {
  Arguments args("weighted_sum_norm_add", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.residual = args.activation("residual", residual, "*H");
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  sum.output = args.output(sum.H);
  return sum;
}

inline WeightedSum checked_weighted_sum_dual_norm_add(const Tensor& slots, const Tensor& weights,
                                                      const Tensor& residual, const Tensor& residual_norm_weight,
                                                      const Tensor& moe_norm_weight, double eps) {
  Arguments args("weighted_sum_dual_norm_add", "slots", slots);
  WeightedSum sum = weighted_sum_inputs(args, slots, weights);
  sum.residual = args.activation("residual", residual, "*H");
  sum.residual_norm_weight = args.parameter("residual_norm_weight", residual_norm_weight, "H");
  sum.norm_weight = args.parameter("moe_norm_weight", moe_norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  sum.output = args.output(sum.H);
  return sum;
}

// norm_add and residual_norm take the same arguments.
struct ResidualNorm {
  Tensor residual, input, weight;
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
  if (single) args.bind('S', 1);
  call.scalar = args.parameter("scalar", scalar, single ? "S" : "H");
  call.eps = args.not_negative("eps", eps);
  call.T = args.tokens();
  call.H = args['H'];
  call.output = args.output(call.H);
  return call;
}

inline ResidualNorm checked_norm_add(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& scalar, double eps) {
  return residual_norm_inputs("norm_add", residual, input, weight, scalar, eps);
}

inline ResidualNorm checked_residual_norm(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                          const OptionalTensor& scalar, double eps) {
  ResidualNorm call = residual_norm_inputs("residual_norm", residual, input, weight, scalar, eps);
  call.sum = empty(call.output.sizes(), call.output.options());
  return call;
}

}  // namespace moe_metal
