// The checks and outputs of rope and attention. csrc/ops.h says how contracts are written.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "arguments.h"

namespace moe_metal {

// Queries, keys or values. They are not copied, so they may have any strides. The rows of the output are contiguous.
struct RopeHeads {
  Tensor input;        // [B, T, heads, D]
  Tensor norm_weight;  // undefined, [D] or [heads, D], contiguous: float32 or the dtype of q
  int64_t heads = 0, D = 0;
  int64_t R = 0;       // the pairs that are rotated
  float scale = 1;     // of the input
  Tensor output = {};  // [B, heads, T, D]
  RopeNorm norm = RopeNorm::none;
};

struct Rope {
  RopeHeads q, k;
  RopeHeads v;  // only in the cache's op: values, and what precedes each query in the output's rows
  RopeHeads q_first;
  Tensor cos, sin;  // [B, T, R] of any strides, the first of which may be 0: float32 or the dtype of q
  float eps;
  bool interleaved;         // pairs are neighbours in the input
  bool pairs_stay = false;  // and in the output
  bool norms_last = false;  // after the rotation
  int64_t B, T;

  bool is_empty() const { return q.output.numel() == 0; }
  std::tuple<Tensor, Tensor> outputs() const { return {q.output, k.output}; }
};

inline constexpr char schema_rope[] =
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, "
    "float eps=1e-6, bool interleaved=False) -> (Tensor q, Tensor k)";
// All but the outputs. Without angles nothing is rotated.
inline void check_rotated(Arguments& args, const Tensor& q, const Tensor& k, const OptionalTensor& cos,
                          const OptionalTensor& sin, const OptionalTensor& q_norm_weight,
                          const OptionalTensor& k_norm_weight, double eps, bool interleaved, Rope& call) {
  const auto check_norm = [&](const char* name, const OptionalTensor& weight, const char* all_heads, RopeHeads& heads) {
    if (!Arguments::given(weight)) return;
    const bool all = weight->dim() == 2;
    heads.norm = all ? RopeNorm::all_heads : RopeNorm::each_head;
    heads.norm_weight = args.parameter(name, *weight, all ? all_heads : "D");
  };
  call.q.input = args.activation("q", q, "BTAD");
  args.at_least_one('A', "q");
  args.in_range("q", args['D'], 2, std::numeric_limits<int64_t>::max(), "its size of a head, D");
  call.k.input = args.activation("k", k, "BTJD");
  args.at_least_one('J', "k");
  if (Arguments::given(cos) || Arguments::given(sin)) {
    call.cos = args.angles("cos", cos.value_or(Tensor()), "BTR");
    call.sin = args.angles("sin", sin.value_or(Tensor()), "BTR");
    args.in_range("cos", args['R'], 1, args['D'] / 2, "the pairs of a head, R");
    call.q.R = call.k.R = args['R'];
  }
  check_norm("q_norm_weight", q_norm_weight, "AD", call.q);
  check_norm("k_norm_weight", k_norm_weight, "JD", call.k);
  call.eps = args.not_negative("eps", eps);
  call.interleaved = interleaved;
  make_contiguous({&call.q.norm_weight, &call.k.norm_weight});
  std::tie(call.B, call.T) = std::tuple(args['B'], args['T']);
  std::tie(call.q.heads, call.k.heads) = std::tuple(args['A'], args['J']);
  call.q.D = call.k.D = args['D'];
}
inline Rope check_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                       const OptionalTensor& q_norm_weight, const OptionalTensor& k_norm_weight, double eps,
                       bool interleaved) {
  Arguments args("rope", "q", q);
  args.check_given("cos", cos);
  Rope call;
  check_rotated(args, q, k, cos, sin, q_norm_weight, k_norm_weight, eps, interleaved, call);
  for (RopeHeads* heads : {&call.q, &call.k}) heads->output = args.output({call.B, heads->heads, call.T, heads->D});
  return call;
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

  bool is_empty() const { return output.numel() == 0; }
  Tensor outputs() const { return output; }
};

inline constexpr char schema_attention[] =
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? sinks=None, *, float? scale=None, "
    "bool causal=False, int window=0, float softcap=0.0) -> Tensor";
inline Attention check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
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
  return call;
}

}  // namespace moe_metal
