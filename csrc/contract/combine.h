// The checks and outputs of the weighted sums and the norms. csrc/ops.h says how contracts are written.
#pragma once
#include <tuple>

#include "arguments.h"
#include "contract/in_place.h"

namespace moe_metal {

// The five weighted sums share their arguments; each uses the tensors that its schema has.
struct WeightedSum {
  Tensor slots, weights;
  Tensor shared, shared_gate, residual;
  Tensor norm_weight, residual_norm_weight;
  float eps = 0;
  int64_t T = 0, K = 0, H = 0;
  Tensor output;  // undefined for weighted_sum_residual_

  bool is_empty() const { return T == 0; }
  Tensor outputs() const { return output; }
};

struct WeightedSumResidual : WeightedSum {
  InPlace in_place;

  void done() const { in_place.done(); }
  void outputs() const {}
};

struct WeightedSumResidualNorm : WeightedSum {
  InPlace in_place;

  void done() const { in_place.done(); }
};

inline void check_slots(Arguments& args, const Tensor& slots, const Tensor& weights, WeightedSum& sum) {
  sum.slots = args.activation("slots", slots, "*KH");
  sum.weights = args.parameter("weights", weights, "*K");
  sum.T = args.tokens();
  sum.K = args['K'];
  sum.H = args['H'];
  args.at_least_one('K', "slots");
  args.at_least_one('H', "slots");
}

inline void make_contiguous(WeightedSum& sum) {
  make_contiguous({&sum.slots, &sum.weights, &sum.shared, &sum.shared_gate, &sum.residual, &sum.norm_weight,
                   &sum.residual_norm_weight});
}

inline constexpr char schema_weighted_sum[] =
    "(Tensor slots, Tensor weights, Tensor? shared=None, Tensor? shared_gate=None, Tensor? residual=None) -> Tensor";
inline WeightedSum check_weighted_sum(const Tensor& slots, const Tensor& weights, const OptionalTensor& shared,
                                      const OptionalTensor& shared_gate, const OptionalTensor& residual) {
  Arguments args("weighted_sum", "slots", slots);
  WeightedSum sum;
  check_slots(args, slots, weights, sum);
  sum.shared = args.activation("shared", shared, "*H");
  sum.shared_gate = args.parameter("shared_gate", shared_gate, "*");
  TORCH_CHECK(!sum.shared_gate.defined() || sum.shared.defined(), args.prefix("shared_gate"),
              "expected `shared` as well, got none");
  sum.residual = args.activation("residual", residual, "*H");
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  return sum;
}

inline constexpr char schema_weighted_sum_residual_[] = "(Tensor(a!) residual, Tensor slots, Tensor weights) -> ()";
inline WeightedSumResidual check_weighted_sum_residual_(const Tensor& residual, const Tensor& slots,
                                                        const Tensor& weights) {
  Arguments args("weighted_sum_residual_", "residual", residual);
  args.activation("residual", residual, "*H");
  WeightedSumResidual sum;
  check_slots(args, slots, weights, sum);
  sum.in_place = in_place(args, residual, {&slots, &weights});
  sum.residual = sum.in_place.work;
  make_contiguous(sum);
  return sum;
}

inline constexpr char schema_weighted_sum_residual_norm_[] =
    "(Tensor(a!) residual, Tensor slots, Tensor weights, Tensor norm_weight, *, float eps=1e-6) -> Tensor";
inline WeightedSumResidualNorm check_weighted_sum_residual_norm_(const Tensor& residual, const Tensor& slots,
                                                                 const Tensor& weights, const Tensor& norm_weight,
                                                                 double eps) {
  Arguments args("weighted_sum_residual_norm_", "residual", residual);
  args.activation("residual", residual, "*H");
  WeightedSumResidualNorm sum;
  check_slots(args, slots, weights, sum);
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  sum.in_place = in_place(args, residual, {&slots, &weights, &norm_weight});
  sum.residual = sum.in_place.work;
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  return sum;
}

inline constexpr char schema_weighted_sum_norm_add[] =
    "(Tensor slots, Tensor weights, Tensor residual, Tensor norm_weight, *, float eps=1e-6) -> Tensor";
inline WeightedSum check_weighted_sum_norm_add(const Tensor& slots, const Tensor& weights, const Tensor& residual,
                                               const Tensor& norm_weight, double eps) {
  Arguments args("weighted_sum_norm_add", "slots", slots);
  WeightedSum sum;
  check_slots(args, slots, weights, sum);
  sum.residual = args.activation("residual", residual, "*H");
  sum.norm_weight = args.parameter("norm_weight", norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  return sum;
}

inline constexpr char schema_weighted_sum_dual_norm_add[] =
    "(Tensor slots, Tensor weights, Tensor residual, Tensor residual_norm_weight, "
    "Tensor moe_norm_weight, *, float eps=1e-6) -> Tensor";
inline WeightedSum check_weighted_sum_dual_norm_add(const Tensor& slots, const Tensor& weights, const Tensor& residual,
                                                    const Tensor& residual_norm_weight, const Tensor& moe_norm_weight,
                                                    double eps) {
  Arguments args("weighted_sum_dual_norm_add", "slots", slots);
  WeightedSum sum;
  check_slots(args, slots, weights, sum);
  sum.residual = args.activation("residual", residual, "*H");
  sum.residual_norm_weight = args.parameter("residual_norm_weight", residual_norm_weight, "H");
  sum.norm_weight = args.parameter("moe_norm_weight", moe_norm_weight, "H");
  sum.eps = args.not_negative("eps", eps);
  make_contiguous(sum);
  sum.output = args.output(sum.H);
  return sum;
}

// norm and norm_add. norm has neither a residual nor a scalar.
struct Norm {
  Tensor residual, input;
  Tensor weight;  // may be undefined in norm
  Tensor scalar;  // undefined, [1] or [H]
  float eps;
  int64_t T, H;
  int64_t input_row;  // between rows of the input, in elements
  Tensor output;

  bool is_empty() const { return T == 0; }
  Tensor outputs() const { return output; }
};

struct ResidualNorm : Norm {
  Tensor sum;

  std::tuple<Tensor, Tensor> outputs() const { return {output, sum}; }
};

// The elements from one row to the next, if that is the same number for all rows; 0 if not. A part of the columns of a
// matrix is such a tensor.
inline int64_t row_stride(const Tensor& rows) {
  const int64_t H = rows.size(-1);
  if (H > 1 && rows.stride(-1) != 1) return 0;
  int64_t stride = -1, next = 0;
  for (int64_t d = rows.dim() - 2; d >= 0; --d) {
    if (rows.size(d) == 1) continue;
    if (stride < 0) stride = next = rows.stride(d);
    if (rows.stride(d) != next) return 0;
    next *= rows.size(d);
  }
  return stride < 0 ? H : stride < H ? 0 : stride;
}

inline constexpr char schema_norm[] = "(Tensor input, Tensor? weight=None, *, float eps=1e-6) -> Tensor";
inline Norm check_norm(const Tensor& input, const OptionalTensor& weight, double eps) {
  Arguments args("norm", "input", input);
  Norm call;
  call.input = args.activation("input", input, "*H");
  args.at_least_one('H', "input");
  call.weight = args.parameter("weight", weight, "H");
  call.eps = args.not_negative("eps", eps);
  make_contiguous({&call.weight});
  call.input_row = row_stride(call.input);
  if (call.input_row == 0) make_contiguous({&call.input});
  call.T = args.tokens();
  call.H = args['H'];
  if (call.input_row == 0) call.input_row = call.H;
  call.output = args.output(call.H);
  return call;
}

// For norm_add and residual_norm, which have the same arguments.
inline Norm check_norm_of_two(const char* op, const Tensor& residual, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& scalar, double eps) {
  Arguments args(op, "residual", residual);
  Norm call;
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
  call.H = call.input_row = args['H'];
  call.output = args.output(call.H);
  return call;
}

inline constexpr char schema_norm_add[] =
    "(Tensor residual, Tensor input, Tensor weight, Tensor? scalar=None, *, float eps=1e-6) -> Tensor";
inline Norm check_norm_add(const Tensor& residual, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& scalar, double eps) {
  return check_norm_of_two("norm_add", residual, input, weight, scalar, eps);
}

inline constexpr char schema_residual_norm[] =
    "(Tensor residual, Tensor input, Tensor weight, Tensor? scalar=None, *, float eps=1e-6) "
    "-> (Tensor output, Tensor sum)";
inline ResidualNorm check_residual_norm(const Tensor& residual, const Tensor& input, const Tensor& weight,
                                        const OptionalTensor& scalar, double eps) {
  const Norm call = check_norm_of_two("residual_norm", residual, input, weight, scalar, eps);
  return {call, GivenOutputs::next(call.output.sizes(), call.output.options())};
}

}  // namespace moe_metal
