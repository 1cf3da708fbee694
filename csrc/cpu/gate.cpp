// The logits are float from the products on, whatever the dtypes, and come in one of three ways:
//   few tokens    a dot product per expert and token, experts shared out among threads
//   bfloat16      AMX multiplies it exactly, where there is AMX; everything else of the op happens around its tiles
//   otherwise     rows made float and normed a chunk at a time, then a matrix product in float
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <memory>

#include "contract.h"
#include "norm.h"
#include "routing.h"
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/CPUBlas.h>
#endif

namespace moe_metal {
namespace {

const float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }

// From logits to the outputs of token t. One per thread.
class Rows {
 public:
  explicit Rows(const Gate& call)
      : call_(call), route_(call.params, floats(call.select_bias), floats(call.per_expert_scale)) {}

  void operator()(int64_t t, float* logits) {
    const int64_t E = call_.params.experts, K = call_.params.top_k;
    if (const float* bias = floats(call_.router_bias)) {
      for (int64_t e = 0; e < E; ++e) logits[e] += bias[e];
    }
    route_(logits, call_.weights.mutable_data_ptr<float>() + t * K, call_.experts.mutable_data_ptr<int32_t>() + t * K);
  }

 private:
  const Gate& call_;
  Router route_;
};

constexpr int64_t kGrain = 16;  // rows to route that are worth a thread

void route_rows(const Gate& call, int64_t first, int64_t count, float* logits) {
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    Rows route(call);
    for (int64_t i = begin; i < end; ++i) route(first + i, logits + i * call.params.experts);
  });
}

// to[i] = token first + i as float, and normed
void wide_rows(const Gate& call, int64_t first, int64_t count, float* to) {
  const int64_t H = call.H;
  const float* norm_weight = floats(call.norm_weight);
  with_dtype(call.hidden.scalar_type(), [&](auto scalar) {
    const auto* hidden = call.hidden.const_data_ptr<decltype(scalar)>() + first * H;
    for_each_row(count, 2 * H, 0, [=, &call](int64_t i, float*) {
      const auto* from = hidden + i * H;
      const Vec scale(norm_weight ? rms(from, H, call.eps) : 1.0f);
      for_each_vector(H, [=](int64_t h, auto n) {
        const Vec x = load(from + h, n);
        store(to + i * H + h, norm_weight ? x * scale * load(norm_weight + h, n) : x, n);
      });
    });
  });
}

template <class Scalar>
float dot(const Scalar* row, const float* x, int64_t H) {
  Vec sums[kUnroll] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t h = 0;
  for (; h + kUnroll * kLanes <= H; h += kUnroll * kLanes) {
    for (int v = 0; v < kUnroll; ++v) {
      const int64_t at = h + v * kLanes;
      sums[v] = at::vec::fmadd(load(row + at, Whole()), load(x + at, Whole()), sums[v]);
    }
  }
  for_each_vector(H - h, [&](int64_t i, auto count) {
    sums[0] = at::vec::fmadd(load(row + h + i, count), load(x + h + i, count), sums[0]);
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void few_tokens(const Gate& call) {
  const int64_t T = call.T, H = call.H, E = call.params.experts;
  std::vector<float> x(T * H), logits(T * E);
  wide_rows(call, 0, T, x.data());
  with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
    const auto* router_weight = call.router_weight.const_data_ptr<decltype(scalar)>();
    for_each_row(E, H * T, 0, [&](int64_t e, float*) {
      for (int64_t t = 0; t < T; ++t) logits[t * E + e] = dot(router_weight + e * H, &x[t * H], H);
    });
  });
  route_rows(call, 0, T, logits.data());
}

void many_tokens(const Gate& call) {
  constexpr int64_t kChunk = 512;  // 4 MB of rows with H = 2048: they stay in cache until they are multiplied
  const Tensor router_weight = call.router_weight.to(at::kFloat);
  const bool as_they_are = call.hidden.scalar_type() == at::kFloat && !call.norm_weight.defined();
  const Tensor hidden = as_they_are ? call.hidden.view({call.T, call.H})
                                    : at::empty({std::min(kChunk, call.T), call.H}, router_weight.options());
  for (int64_t first = 0; first < call.T; first += kChunk) {
    const int64_t count = std::min(kChunk, call.T - first);
    const Tensor rows = hidden.narrow(0, as_they_are ? first : 0, count);
    if (!as_they_are) wide_rows(call, first, count, rows.mutable_data_ptr<float>());
    route_rows(call, first, count, at::linear(rows, router_weight).mutable_data_ptr<float>());
  }
}

#if defined(CPU_CAPABILITY_AVX512)
using at::BFloat16;

template <class Scalar>
std::unique_ptr<Scalar[]> scratch(int64_t count) {
  return std::make_unique_for_overwrite<Scalar[]>(count);
}

// AMX wants pairs of neighbours of the right operand side by side, column by column. A pair is as wide as a float, so
// that is the router's weights as floats, transposed: [H / 2, E].
std::unique_ptr<float[]> paired(const Tensor& router_weight) {
  constexpr int64_t kColumns = 64;
  const int64_t E = router_weight.size(0), pairs = router_weight.size(1) / 2;
  auto to = scratch<float>(E * pairs);
  const auto* from = reinterpret_cast<const float*>(router_weight.const_data_ptr<BFloat16>());
  for_each_row(at::divup(pairs, kColumns), E * kColumns, 0, [&](int64_t block, float*) {
    const int64_t column = block * kColumns, count = std::min(kColumns, pairs - column);
    at::vec::transpose_mxn<float>(from + column, pairs, &to[column * E], E, E, count);
  });
  return to;
}

// A block of tokens through the product and the router. One per thread.
// A normed row is float. It goes in as the sum of three rows of bfloat16, of 8 bits each, which is exact.
class Tiles {
 public:
  static constexpr int64_t kTokens = 32;

  Tiles(const Gate& call, const float* pairs)
      : call_(call),
        pairs_(reinterpret_cast<const BFloat16*>(pairs)),
        route_(call),
        parts_(scratch<BFloat16>(call.norm_weight.defined() ? 3 * kTokens * call.H : 0)),
        logits_(scratch<float>(kTokens * call.params.experts)) {}
  ~Tiles() { at::native::cpublas::brgemm_release(); }
  Tiles(const Tiles&) = delete;

  void operator()(int64_t block) {
    const int64_t H = call_.H, first = block * kTokens, count = std::min(kTokens, call_.T - first);
    const auto* hidden = call_.hidden.const_data_ptr<BFloat16>() + first * H;
    if (call_.norm_weight.defined()) {
      for (int64_t t = 0; t < count; ++t) split_normed(hidden + t * H, &parts_[t * H]);
      for (int part = 0; part < 3; ++part) multiply(&parts_[part * kTokens * H], count, part > 0);
    } else {
      multiply(hidden, count, false);
    }
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  void split_normed(const BFloat16* row, BFloat16* to) const {
    const float* norm_weight = floats(call_.norm_weight);
    const Vec scale(rms(row, call_.H, call_.eps)), upper_half(std::bit_cast<float>(0xffff0000));
    for_each_vector(call_.H, [&](int64_t h, auto n) {
      Vec rest = load(row + h, n) * scale * load(norm_weight + h, n);
      for (int part = 0; part < 3; ++part) {
        const Vec top = rest & upper_half;
        store(to + part * kTokens * call_.H + h, top, n);
        rest = rest - top;
      }
    });
  }

  // logits = rows * router_weight, or += that
  void multiply(const BFloat16* rows, int64_t count, bool add) {
    const int64_t H = call_.H, E = call_.params.experts;
    at::native::cpublas::brgemm(count, E, H, H, E, E, add, rows, pairs_, logits_.get());
  }

  const Gate& call_;
  const BFloat16* pairs_;
  Rows route_;
  std::unique_ptr<BFloat16[]> parts_;
  std::unique_ptr<float[]> logits_;
};

bool has_tiles(const Gate& call) {
  return call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16 &&
         call.H % 2 == 0 && at::native::cpublas::could_pack(at::kBFloat16);
}

void by_tiles(const Gate& call) {
  const auto pairs = paired(call.router_weight);
  at::parallel_for(0, at::divup(call.T, Tiles::kTokens), 1, [&](int64_t begin, int64_t end) {
    Tiles tiles(call, pairs.get());
    for (int64_t block = begin; block < end; ++block) tiles(block);
  });
}
#else
bool has_tiles(const Gate&) { return false; }
void by_tiles(const Gate&) {}
#endif

std::tuple<Tensor, Tensor> gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                                const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                                const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                std::string_view group_score, double scaling_factor, double softcap, double eps) {
  Gate call =
      gate_arguments(hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale,
                     {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap}, eps);
  if (call.T == 0) return {call.weights, call.experts};
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  // Making the router's weights float, or arranging them for AMX, costs as much as some tokens' dot products (measured
  // with E = 128, H = 2048).
  const int64_t few = call.router_weight.scalar_type() == at::kFloat ? 2 : 8;
  if (call.T <= few) {
    few_tokens(call);
  } else if (has_tiles(call)) {
    by_tiles(call);
  } else {
    many_tokens(call);
  }
  return {call.weights, call.experts};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("gate", &moe_metal::gate); }
