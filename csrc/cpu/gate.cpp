// The logits are float from the products on, whatever the dtypes, and come in one of two ways, both of which add in an
// order that neither the threads nor the other tokens change:
//   dot products   of tokens and the router's rows, experts shared out among threads
//   oneDNN's brgemm   of blocks of tokens, on AVX-512: in bfloat16 where both operands are, with AMX where there is AMX
#include <torch/library.h>

#include <memory>

#include "contract.h"
#include "experts_dots.h"
#include "norm.h"
#include "routing.h"
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/CPUBlas.h>
#endif

namespace moe_metal {
namespace {

const float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<float>() : nullptr; }

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

// to[i] = token first + i as float, and normed
void wide_rows(const Gate& call, int64_t first, int64_t count, float* to) {
  const int64_t H = call.H;
  const float* norm_weight = floats(call.norm_weight);
  with_dtype(call.hidden.scalar_type(), [&](auto scalar) {
    const auto* hidden = call.hidden.data_ptr<decltype(scalar)>() + first * H;
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
std::unique_ptr<Scalar[]> scratch(int64_t count) {
  return std::make_unique_for_overwrite<Scalar[]>(count);
}

void by_dots(const Gate& call) {
  constexpr int64_t kBlock = 64, kExperts = 16;
  const int64_t H = call.H, E = call.params.experts;
  const auto x = scratch<float>(std::min(call.T, kBlock) * H), logits = scratch<float>(std::min(call.T, kBlock) * E);
  for (int64_t first = 0; first < call.T; first += kBlock) {
    const int64_t count = std::min(kBlock, call.T - first);
    wide_rows(call, first, count, x.get());
    with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
      const auto* router_weight = call.router_weight.data_ptr<decltype(scalar)>();
      for_each_row(at::divup(E, kExperts), kExperts * count * H, 0, [&](int64_t block, float*) {
        const int64_t e = block * kExperts;
        const float* from[kBlock];
        float* to[kBlock];
        for (int64_t t = 0; t < count; ++t) from[t] = &x[t * H], to[t] = &logits[t * E + e];
        product_by_rows(Matrix<decltype(scalar)>{router_weight + e * H, H, 1, std::min(kExperts, E - e), H},
                        {from, to, count});
      });
    });
    constexpr int64_t kGrain = 16;  // rows to route that are worth a thread
    at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
      Rows route(call);
      for (int64_t t = begin; t < end; ++t) route(first + t, &logits[t * E]);
    });
  }
}

#if defined(CPU_CAPABILITY_AVX512) && defined(CPUBLAS_BRGEMM_F32F32F32) && defined(CPUBLAS_BRGEMM_BF16BF16F32)
using at::BFloat16;

// The router's weights as brgemm's right operand: [H, E], and in bfloat16 pairs of neighbours in H side by side. A pair
// is as wide as a float, so either way it is a matrix of such words, transposed.
std::unique_ptr<float[]> right_operand(const Tensor& router_weight) {
  constexpr int64_t kColumns = 64;
  const int64_t E = router_weight.size(0), words = router_weight.nbytes() / E / sizeof(float);
  auto to = scratch<float>(E * words);
  const auto* from = static_cast<const float*>(router_weight.const_data_ptr());
  for_each_row(at::divup(words, kColumns), E * kColumns, 0, [&](int64_t block, float*) {
    const int64_t column = block * kColumns, count = std::min(kColumns, words - column);
    at::vec::transpose_mxn<float>(from + column, words, &to[column * E], E, E, count);
  });
  return to;
}

// A block of tokens through the product and the router. One per thread. Scalar is the dtype of the product's operands.
// A normed row is float. In bfloat16 it is the sum of three rows of 8 bits each, which is exact.
template <class Scalar>
class Blocks {
 public:
  static constexpr int64_t kTokens = 32;
  static constexpr bool kFloat = std::is_same_v<Scalar, float>;

  Blocks(const Gate& call, const float* right)
      : call_(call),
        right_(reinterpret_cast<const Scalar*>(right)),
        as_they_are_(call.hidden.scalar_type() == c10::CppTypeToScalarType<Scalar>::value &&
                     !call.norm_weight.defined()),
        left_(scratch<Scalar>(as_they_are_ ? 0 : (kFloat ? 1 : 3) * kTokens * call.H)),
        route_(call),
        logits_(scratch<float>(kTokens * call.params.experts)) {}
  ~Blocks() { at::native::cpublas::brgemm_release(!kFloat); }
  Blocks(const Blocks&) = delete;

  void operator()(int64_t block) {
    const int64_t H = call_.H, first = block * kTokens, count = std::min(kTokens, call_.T - first);
    if (as_they_are_) {
      multiply(call_.hidden.data_ptr<Scalar>() + first * H, count, false);
    } else if constexpr (kFloat) {
      wide_rows(call_, first, count, left_.get());
      multiply(left_.get(), count, false);
    } else {
      for (int64_t t = 0; t < count; ++t) split_normed(first + t, &left_[t * H]);
      for (int part = 0; part < 3; ++part) multiply(&left_[part * kTokens * H], count, part > 0);
    }
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  void split_normed(int64_t t, Scalar* to) const {
    const int64_t H = call_.H;
    const Scalar* row = call_.hidden.data_ptr<Scalar>() + t * H;
    const float* norm_weight = floats(call_.norm_weight);
    const Vec scale(rms(row, H, call_.eps)), upper_half(std::bit_cast<float>(0xffff0000));
    for_each_vector(H, [&](int64_t h, auto n) {
      Vec rest = load(row + h, n) * scale * load(norm_weight + h, n);
      for (int part = 0; part < 3; ++part) {
        const Vec top = rest & upper_half;
        store(to + part * kTokens * H + h, top, n);
        rest = rest - top;
      }
    });
  }

  // logits = rows * right, or += that
  void multiply(const Scalar* rows, int64_t count, bool add) {
    const int64_t H = call_.H, E = call_.params.experts;
    at::native::cpublas::brgemm(count, E, H, H, E, E, add, rows, right_, logits_.get(), !kFloat);
  }

  const Gate& call_;
  const Scalar* right_;
  const bool as_they_are_;
  std::unique_ptr<Scalar[]> left_;
  Rows route_;
  std::unique_ptr<float[]> logits_;
};

template <class Scalar>
void by_blocks(const Gate& call, const Tensor& router_weight) {
  const auto right = right_operand(router_weight);
  at::parallel_for(0, at::divup(call.T, Blocks<Scalar>::kTokens), 1, [&](int64_t begin, int64_t end) {
    Blocks<Scalar> run(call, right.get());
    for (int64_t block = begin; block < end; ++block) run(block);
  });
}

// Arranging the router's weights costs as much as some tokens' dot products (measured with E = 128, H = 2048).
bool worth_blocks(const Gate& call) { return call.T > 8; }

void by_blocks(const Gate& call) {
  const bool bfloat16 = call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16;
  if (bfloat16 && call.H % 2 == 0 && at::native::cpublas::could_pack(at::kBFloat16)) {
    by_blocks<BFloat16>(call, call.router_weight);
  } else {
    by_blocks<float>(call, call.router_weight.to(at::kFloat));
  }
}
#else
bool worth_blocks(const Gate&) { return false; }
void by_blocks(const Gate&) {}
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
  worth_blocks(call) ? by_blocks(call) : by_dots(call);
  return {call.weights, call.experts};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("gate", &moe_metal::gate); }
