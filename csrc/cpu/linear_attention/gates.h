// The gates of linear_attention_: how much of the state decays, and how much of a value is written.
#pragma once
#include "contract/linear_attention.h"
#include "cpu/linear_attention/convolution.h"

namespace moe_metal {

inline Vec softplus(const Vec& x) { return Vec::blendv(x.exp().log1p(), x, x > Vec(20)); }

// The step of raw decays, whose bias was added, and the factor of the state.
struct Decay {
  Vec step, factor;
  Decay(const LinearAttentionOptions& options, const Vec& raw, float rate) : step(raw), factor(raw) {
    if (options.decay_kind == DecayKind::sigmoid) {
      factor = (Vec(options.lower_bound) / (Vec(1) + (raw * Vec(-rate)).exp())).exp();
      return;
    }
    step = at::vec::minimum(at::vec::maximum(softplus(raw), Vec(options.step_min)), Vec(options.step_max));
    factor = (Vec(-rate) * step).exp();
  }
};

// Calls body(pointer to element 0) with the dtype of a parameter: float32 or Scalar.
template <class Scalar, class Body>
inline void with_parameter(const Tensor& tensor, Body&& body) {
  if (tensor.scalar_type() == at::kFloat) return body(elements<float>(tensor));
  if constexpr (!std::is_same_v<Scalar, float>) body(elements<Scalar>(tensor));
}

// Reads decays and betas of a call, of the `length` floats that a row of factors has.
template <class Scalar>
struct Gates {
  const LinearAttention& call;
  Tensor log_rate, bias;  // float32 or undefined
  int64_t length;         // of a row of factors

  float rate(int64_t head) const { return log_rate.defined() ? std::exp(elements<float>(log_rate)[head]) : 1; }

  // The factors [n, length] and the weights of values [n] of n tokens of a sequence, for value head `j`, `g`.
  void compute(int64_t b, int64_t t, int64_t n, int64_t j, int64_t g, float* factors, float* weights) const {
    if (call.decays_channels()) {
      for (int64_t i = 0; i < n; ++i) channel_factors(b, t + i, j, g, factors + i * length);
    } else {
      head_factors(b, t, n, j, g, factors, weights);
    }
    if (call.options.rule == Rule::delta) betas(b, t, n, j, g, weights);
  }

 private:
  void channel_factors(int64_t b, int64_t t, int64_t j, int64_t g, float* factors) const {
    const Tensor& decay = call.decay;
    const int64_t head = j * call.group() + g;
    with_parameter<Scalar>(decay, [&](const auto* data) {
      data += b * decay.stride(0) + t * decay.stride(1) + j * decay.stride(2) + g * decay.stride(3);
      read_floats(data, decay.stride(4), call.D, factors);
    });
    const float own_rate = rate(head);
    for_each_vector(call.D, [&](int64_t d, auto count) {
      Vec raw = load(factors + d, count);
      if (bias.defined()) raw = raw + load(elements<float>(bias) + head * call.D + d, count);
      store(factors + d, Decay(call.options, raw, own_rate).factor, count);
    });
  }

  void head_factors(int64_t b, int64_t t, int64_t n, int64_t j, int64_t g, float* factors, float* weights) const {
    const int64_t head = j * call.group() + g;
    const float own_rate = rate(head);
    const Vec own_bias(bias.defined() ? elements<float>(bias)[head] : 0);
    read_tokens(call.decay, b, t, n, j, g, weights);
    for_each_vector(n, [&](int64_t i, auto count) {
      const Decay decay(call.options, load(weights + i, count) + own_bias, own_rate);
      store(weights + i, decay.step, count);
      alignas(64) float factor[kLanes];
      store(factor, decay.factor, Whole());
      for (int64_t lane = 0; lane < count; ++lane) {
        std::fill_n(factors + (i + lane) * length, call.D, factor[lane]);
      }
    });
  }

  void betas(int64_t b, int64_t t, int64_t n, int64_t j, int64_t g, float* weights) const {
    read_tokens(call.beta, b, t, n, j, g, weights);
    for_each_vector(n, [&](int64_t i, auto count) {
      store(weights + i, Vec(call.options.beta_scale) / (Vec(1) + load(weights + i, count).neg().exp()), count);
    });
  }

  // One number of each of n tokens.
  void read_tokens(const Tensor& tensor, int64_t b, int64_t t, int64_t n, int64_t j, int64_t g, float* to) const {
    with_parameter<Scalar>(tensor, [&](const auto* data) {
      data += b * tensor.stride(0) + t * tensor.stride(1) + j * tensor.stride(2) + g * tensor.stride(3);
      read_floats(data, tensor.stride(1), n, to);
    });
  }
};

}  // namespace moe_metal
