// The checks and outputs of linear_attention_. csrc/ops.h says how contracts are written.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "contract/in_place.h"

namespace moe_metal {

struct LinearAttentionOptions {
  Rule rule;
  DecayKind decay_kind;
  float lower_bound, step_min, step_max, beta_scale, scale;
  float qk_eps;  // < 0: no norms of q and k
  Pointwise activation;
  ChannelOrder order;
  Pointwise gate_activation;
  bool gate_first, tiled;
  float eps;
};

// Activations, decay, beta, past, mask, state, kept and log are not copied, so they may have any strides.
struct LinearAttention {
  Tensor q, k;         // [B, T, J, D]
  Tensor v, gate;      // [B, T, J, A/J, V]; gate may be undefined
  Tensor decay, beta;  // [B, T, J, A/J], decay may also be [B, T, J, A/J, D]: float32 or the dtype of q
  // Contiguous, float32 or the dtype of q. The shapes are those in torch_moe_metal/recurrence.py.
  Tensor log_rate, decay_bias, norm_weight, skip, conv_weight, conv_bias;
  Tensor past, kept;  // [S, W - 1, C] and [S, R, C], or undefined
  Tensor mask;        // [B, T], or undefined
  Tensor offsets;     // [S + 1] contiguous, or undefined
  Tensor state;       // float32 [S, A, D, V], or undefined
  Tensor log;         // float32 [B, replay + L, A V + J D + A or A D], or undefined
  int64_t B, T, J, A, D, V;
  int64_t S;  // sequences: B without offsets
  int64_t C, W;
  int64_t R;  // rows of kept
  int64_t L, replay;
  LinearAttentionOptions options;
  Tensor output;  // [B, T, A, V]

  int64_t group() const { return A / J; }
  bool decays_channels() const { return decay.dim() == 5; }
  bool norms_groups() const { return norm_weight.defined() && norm_weight.dim() == 2; }
  bool is_empty() const { return B == 0 || (T == 0 && replay == 0 && R == 0); }
  Tensor outputs() const { return output; }
};

inline Tensor check_norm_weight(const Arguments& args, const OptionalTensor& weight, bool tiled) {
  if (!Arguments::given(weight)) return Tensor();
  args.check_parameter("norm_weight", *weight);
  const int64_t A = args['A'], V = args['V'];
  const auto sizes = weight->sizes();
  const bool one = sizes.equals({V});
  const bool groups = sizes.size() == 2 && sizes[0] >= 1 && A % sizes[0] == 0 && sizes[1] == A / sizes[0] * V;
  TORCH_CHECK(one || groups, args.prefix("norm_weight"), "expected shape [V], or [N, A V / N] where N divides A, with ",
              "A = ", A, ", V = ", V, "; got ", sizes);
  TORCH_CHECK(one || !tiled, args.prefix("norm_weight"), "expected shape [V] where tiled is True, got ", sizes);
  return *weight;
}

inline LinearAttentionOptions check_linear_attention_options(const Arguments& args, std::string_view rule,
                                                             std::string_view decay_kind, double lower_bound,
                                                             double step_min, std::optional<double> step_max,
                                                             double beta_scale, std::optional<double> scale,
                                                             std::optional<double> qk_eps, std::string_view activation,
                                                             std::string_view order, std::string_view gate_activation,
                                                             bool gate_first, bool tiled, double eps) {
  LinearAttentionOptions options;
  options.rule = args.one_of<Rule>("rule", rule);
  options.decay_kind = args.one_of<DecayKind>("decay_kind", decay_kind);
  TORCH_CHECK(options.rule == Rule::delta || options.decay_kind == DecayKind::softplus, args.prefix("decay_kind"),
              "expected 'softplus' where rule is 'sum', got '", decay_kind, "'");
  options.lower_bound = args.finite("lower_bound", lower_bound);
  TORCH_CHECK(lower_bound <= 0, args.prefix("lower_bound"), "expected a number <= 0, got ", lower_bound);
  options.step_min = args.finite("step_min", step_min);
  options.step_max = step_max ? args.finite("step_max", *step_max) : std::numeric_limits<float>::infinity();
  TORCH_CHECK(options.step_min <= options.step_max, args.prefix("step_max"),
              "expected a number >= step_min = ", step_min, ", got ", options.step_max);
  options.beta_scale = args.finite("beta_scale", beta_scale);
  options.scale = args.finite("scale", scale.value_or(1 / std::sqrt(static_cast<double>(args['D']))));
  options.qk_eps = qk_eps ? args.not_negative("qk_eps", *qk_eps) : -1;
  options.activation = args.one_of<Pointwise>("activation", activation);
  options.order = args.one_of<ChannelOrder>("order", order);
  options.gate_activation = args.one_of<Pointwise>("gate_activation", gate_activation);
  options.gate_first = gate_first;
  options.tiled = tiled;
  options.eps = args.not_negative("eps", eps);
  return options;
}

inline void check_convolution(Arguments& args, LinearAttention& call, const OptionalTensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& past, const OptionalTensor& kept) {
  args.bind('C', 2 * call.J * call.D + call.A * call.V);
  call.conv_weight = args.parameter("conv_weight", weight, "CW");
  if (call.conv_weight.defined()) args.at_least_one('W', "conv_weight");
  for (const auto& [name, tensor] : {std::pair("conv_bias", &bias), {"past", &past}, {"kept", &kept}}) {
    TORCH_CHECK(call.conv_weight.defined() || !Arguments::given(*tensor), args.prefix(name),
                "expected None where conv_weight is None, got a tensor");
  }
  call.conv_bias = args.parameter("conv_bias", bias, "C");
  call.W = call.conv_weight.defined() ? args['W'] : 1;
  call.C = args['C'];
  args.bind('P', call.W - 1);
  call.past = args.activation("past", past, call.offsets.defined() ? "SPC" : "BPC");
  call.kept = args.activation("kept", kept, call.offsets.defined() ? "SRC" : "BRC");
  call.R = call.kept.defined() ? args['R'] : 0;
  const int64_t rows = call.W - 1 + (call.offsets.defined() ? 0 : call.T);
  TORCH_CHECK(call.R <= rows, args.prefix("kept"), "expected at most ", rows, " rows, R, got ", call.R);
}

// Checks that the tensors which the op writes have memory of their own.
inline void check_written(const Arguments& args, const LinearAttention& call) {
  const auto written = {std::pair("state", &call.state), {"kept", &call.kept}, {"log", &call.log}};
  for (const auto& [name, tensor] : written) {
    if (!tensor->defined()) continue;
    for (const Tensor* other : {&call.q, &call.k, &call.v, &call.decay, &call.beta, &call.gate, &call.log_rate,
                                &call.decay_bias, &call.norm_weight, &call.skip, &call.conv_weight, &call.conv_bias,
                                &call.past, &call.mask, &call.offsets, &call.state, &call.kept, &call.log}) {
      if (other != tensor && other->defined()) check_apart(args, name, *tensor, *other);
    }
    check_own_memory(args, name, *tensor);
  }
}

// Sequences, and the state and log of each.
inline void check_states(Arguments& args, LinearAttention& call, const OptionalTensor& state, const OptionalTensor& log,
                         int64_t replay) {
  call.S = call.offsets.defined() ? args['S'] : call.B;
  call.state = args.float32("state", state, call.offsets.defined() ? "SADV" : "BADV");
  TORCH_CHECK(replay >= 0, args.prefix("replay"), "expected a number >= 0, got ", replay);
  TORCH_CHECK(Arguments::given(log) || replay == 0, args.prefix("replay"), "expected 0 where log is None, got ",
              replay);
  call.replay = replay;
  call.L = 0;
  if (!Arguments::given(log)) return;
  TORCH_CHECK(call.state.defined() && !call.offsets.defined(), args.prefix("log"),
              "expected None without a state or with offsets, got a tensor");
  args.bind('F', call.A * call.V + call.J * call.D + call.A * (call.decays_channels() ? call.D : 1));
  call.log = args.float32("log", log, "BLF");
  TORCH_CHECK(replay <= args['L'] && args['L'] - replay <= call.T, args.prefix("log"), "expected ", replay, " to ",
              replay + call.T, " rows, from replay to replay + T; got ", args['L']);
  call.L = args['L'] - replay;
}

inline void check_offsets(Arguments& args, LinearAttention& call, const OptionalTensor& offsets) {
  if (!Arguments::given(offsets)) return;
  TORCH_CHECK(call.B == 1, args.prefix("offsets"), "expected None where B is not 1, got a tensor with B = ", call.B);
  call.offsets = args.ids("offsets", *offsets, "N");
  TORCH_CHECK(args['N'] >= 2, args.prefix("offsets"), "expected at least 2 elements, got ", args['N']);
  args.bind('S', args['N'] - 1);
}

// q, k and v, and the sizes.
inline void check_heads(Arguments& args, LinearAttention& call, const Tensor& q, const Tensor& k, const Tensor& v,
                        bool by_group) {
  call.q = args.activation("q", q, "BTJD");
  args.at_least_one('J', "q");
  args.in_range("q", args['D'], 1, kMaxStateRows, "its size of a head, D");
  call.k = args.activation("k", k, "BTJD");
  call.v = args.activation("v", v, by_group ? "BTJQV" : "BTAV");
  if (by_group) args.bind('A', args['J'] * args['Q']);
  args.at_least_one('A', "v");
  args.at_least_one('V', "v");
  TORCH_CHECK(args['A'] % args['J'] == 0, args.prefix("v"), "expected A to be a multiple of J = ", args['J'], ", got ",
              args['A']);
  std::tie(call.B, call.T, call.J) = std::tuple(args['B'], args['T'], args['J']);
  std::tie(call.A, call.D, call.V) = std::tuple(args['A'], args['D'], args['V']);
}

// [B, T, A, ...] -> [B, T, J, A / J, ...], without PyTorch's dispatcher
inline Tensor with_groups(const Tensor& tensor, int64_t heads, int64_t group) {
  c10::SmallVector<int64_t, 5> sizes(tensor.sizes().begin(), tensor.sizes().end());
  c10::SmallVector<int64_t, 5> strides(tensor.strides().begin(), tensor.strides().end());
  sizes[2] = group, sizes.insert(sizes.begin() + 2, heads);
  strides.insert(strides.begin() + 2, strides[2] * group);
  return view_of(tensor, sizes, strides, tensor.storage_offset());
}

inline constexpr char schema_linear_attention_[] =
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta=None, Tensor? gate=None, Tensor? log_rate=None, "
    "Tensor? decay_bias=None, Tensor? norm_weight=None, Tensor? skip=None, Tensor? conv_weight=None, "
    "Tensor? conv_bias=None, Tensor? past=None, Tensor? mask=None, Tensor? offsets=None, Tensor(a!)? state=None, "
    "Tensor(b!)? kept=None, Tensor(c!)? log=None, *, str rule='delta', str decay_kind='softplus', "
    "float lower_bound=-5.0, float step_min=0.0, float? step_max=None, float beta_scale=1.0, float? scale=None, "
    "float? qk_eps=1e-6, str activation='silu', str order='qkv', str gate_activation='silu', bool gate_first=False, "
    "bool tiled=False, float eps=1e-6, int replay=0) -> Tensor";
inline LinearAttention check_linear_attention_(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay, const OptionalTensor& beta,
    const OptionalTensor& gate, const OptionalTensor& log_rate, const OptionalTensor& decay_bias,
    const OptionalTensor& norm_weight, const OptionalTensor& skip, const OptionalTensor& conv_weight,
    const OptionalTensor& conv_bias, const OptionalTensor& past, const OptionalTensor& mask,
    const OptionalTensor& offsets, const OptionalTensor& state, const OptionalTensor& kept, const OptionalTensor& log,
    std::string_view rule, std::string_view decay_kind, double lower_bound, double step_min,
    std::optional<double> step_max, double beta_scale, std::optional<double> scale, std::optional<double> qk_eps,
    std::string_view activation, std::string_view order, std::string_view gate_activation, bool gate_first, bool tiled,
    double eps, int64_t replay) {
  Arguments args("linear_attention_", "q", q);
  LinearAttention call;
  const bool by_group = v.defined() && v.dim() == 5;
  const char* heads = by_group ? "BTJQ" : "BTA";
  check_heads(args, call, q, k, v, by_group);
  call.options =
      check_linear_attention_options(args, rule, decay_kind, lower_bound, step_min, step_max, beta_scale, scale, qk_eps,
                                     activation, order, gate_activation, gate_first, tiled, eps);
  const bool sum = call.options.rule == Rule::sum;
  const bool by_channel = !sum && decay.defined() && decay.dim() == (by_group ? 5 : 4);
  call.decay = args.parameter("decay", decay, by_channel ? (by_group ? "BTJQD" : "BTAD") : heads);
  TORCH_CHECK(Arguments::given(beta) != sum, args.prefix("beta"), "expected ", sum ? "None" : "a tensor",
              " where rule is '", rule, "', got ", sum ? "a tensor" : "None");
  call.beta = args.parameter("beta", beta, heads);
  call.gate = args.activation("gate", gate, by_group ? "BTJQV" : "BTAV");
  for (Tensor* tensor : {&call.v, &call.gate, &call.decay, &call.beta}) {
    if (tensor->defined() && !by_group) *tensor = with_groups(*tensor, call.J, call.group());
  }
  call.log_rate = args.parameter("log_rate", log_rate, "A");
  call.decay_bias = args.parameter("decay_bias", decay_bias, by_channel ? "AD" : "A");
  call.norm_weight = check_norm_weight(args, norm_weight, tiled);
  call.skip = args.parameter("skip", skip, "A");
  call.mask = args.bools("mask", mask, "BT");
  check_offsets(args, call, offsets);
  check_convolution(args, call, conv_weight, conv_bias, past, kept);
  check_states(args, call, state, log, replay);
  check_written(args, call);
  make_contiguous({&call.log_rate, &call.decay_bias, &call.norm_weight, &call.skip, &call.conv_weight, &call.conv_bias,
                   &call.offsets});
  call.output = args.output({call.B, call.T, call.A, call.V});
  return call;
}

}  // namespace moe_metal
