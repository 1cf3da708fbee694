// The checks and outputs of the router's ops: route and gate. csrc/ops.h says how contracts are written.
#pragma once
#include <string_view>
#include <tuple>

#include "arguments.h"
#include "common.h"

// The routing options in a schema.
#define MOE_METAL_ROUTING                                                             \
  "int top_k, str scoring='softmax', str renormalize='before_scale', int n_group=1, " \
  "int topk_group=1, str group_score='top2_sum', float scaling_factor=1.0, float softcap=0.0, float sum_eps=1e-20"

namespace moe_metal {

// The routing options of a call, not yet checked.
struct RoutingOptions {
  int64_t top_k;
  std::string_view scoring, renormalize;
  int64_t n_group, topk_group;
  std::string_view group_score;
  double scaling_factor, softcap, sum_eps;
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
      .sum_eps = args.not_negative("sum_eps", options.sum_eps),
  };
}

struct Route {
  Tensor logits, select_bias, per_expert_scale;
  RoutingParams params;
  int64_t T;
  Tensor weights, ids;

  bool is_empty() const { return T == 0; }
  std::tuple<Tensor, Tensor> outputs() const { return {weights, ids}; }
};

inline constexpr char schema_route[] =
    "(Tensor logits, Tensor? select_bias=None, Tensor? per_expert_scale=None, *, " MOE_METAL_ROUTING
    ") -> (Tensor weights, Tensor ids)";
inline Route check_route(const Tensor& logits, const OptionalTensor& select_bias,
                         const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                         std::string_view renormalize, int64_t n_group, int64_t topk_group,
                         std::string_view group_score, double scaling_factor, double softcap, double sum_eps) {
  Arguments args("route", "logits", logits);
  Route call;
  call.logits = args.activation("logits", logits, "*E");
  call.select_bias = args.parameter("select_bias", select_bias, "E");
  call.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  call.params = routing_params(
      args, {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap, sum_eps});
  make_contiguous({&call.logits, &call.select_bias, &call.per_expert_scale});
  call.T = args.tokens();
  call.weights = args.output(top_k, at::kFloat);
  call.ids = args.output(top_k, at::kInt);
  return call;
}

struct Gate {
  Tensor hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale;
  RoutingParams params;
  float eps;
  int64_t T, H;
  Tensor weights, ids;

  bool is_empty() const { return T == 0; }
  std::tuple<Tensor, Tensor> outputs() const { return {weights, ids}; }
};

inline constexpr char schema_gate[] =
    "(Tensor hidden, Tensor router_weight, Tensor? norm_weight=None, Tensor? router_bias=None, "
    "Tensor? select_bias=None, Tensor? per_expert_scale=None, *, " MOE_METAL_ROUTING
    ", float eps=1e-6) -> (Tensor weights, Tensor ids)";
inline Gate check_gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                       const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                       const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                       std::string_view renormalize, int64_t n_group, int64_t topk_group, std::string_view group_score,
                       double scaling_factor, double softcap, double sum_eps, double eps) {
  Arguments args("gate", "hidden", hidden);
  Gate call;
  call.hidden = args.activation("hidden", hidden, "*H");
  args.at_least_one('H', "hidden");
  call.router_weight = args.parameter("router_weight", router_weight, "EH");
  call.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  call.router_bias = args.parameter("router_bias", router_bias, "E");
  call.select_bias = args.parameter("select_bias", select_bias, "E");
  call.per_expert_scale = args.parameter("per_expert_scale", per_expert_scale, "E");
  call.params = routing_params(
      args, {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap, sum_eps});
  call.eps = args.not_negative("eps", eps);
  make_contiguous({&call.hidden, &call.router_weight, &call.norm_weight, &call.router_bias, &call.select_bias,
                   &call.per_expert_scale});
  call.T = args.tokens();
  call.H = args['H'];
  call.weights = args.output(top_k, at::kFloat);
  call.ids = args.output(top_k, at::kInt);
  return call;
}

}  // namespace moe_metal
