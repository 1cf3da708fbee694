// The short convolution over time of linear_attention_ and short_conv_.
#pragma once
#include <ATen/core/Tensor.h>

#include "common.h"
#include "cpu/vector/rows.h"
#include "cpu/vector/sigmoid.h"

namespace moe_metal {

inline Vec pointwise(Pointwise kind, const Vec& x) {
  if (kind == Pointwise::silu) return times_sigmoid(x, x);
  return kind == Pointwise::sigmoid ? times_sigmoid(Vec(1), x) : x;
}

// Neighbouring channels of the convolution's weight: the factors of each tap, and the bias.
struct Taps {
  int64_t channels, W;
  std::unique_ptr<float[], Free> factors;  // [W, channels]
  const float* bias;                       // or null

  // Channels [first, first + channels) of weight [C, W] and bias [C], both float32.
  Taps(const Tensor& weight, const Tensor& bias, int64_t first, int64_t channels)
      : channels(channels),
        W(weight.size(1)),
        factors(scratch<float>(W * channels)),
        bias(bias.defined() ? elements<float>(bias) + first : nullptr) {
    const float* from = elements<float>(weight) + first * W;
    if (W == 4) read_four(from);
    for (int64_t i = 0; i < W && W != 4; ++i) {
      for (int64_t c = 0; c < channels; ++c) factors[i * channels + c] = from[c * W + i];
    }
  }

  // out[t] = activation(sum of factors[i] * rows[t + i * dilation] + bias) for T tokens, where a row has `channels`
  // numbers. Rows of `out` are `stride` apart.
  void convolve(const float* rows, int64_t T, int64_t dilation, Pointwise activation, float* out,
                int64_t stride) const {
    for (int64_t t = 0; t < T; ++t) {
      for_each_vector(channels, [&](int64_t c, auto count) {
        Vec sum = bias ? load(bias + c, count) : Vec(0);
        for (int64_t i = 0; i < W; ++i) {
          const Vec factor = load(factors.get() + i * channels + c, count);
          sum = at::vec::fmadd(factor, load(rows + (t + i * dilation) * channels + c, count), sum);
        }
        store(out + t * stride + c, pointwise(activation, sum), count);
      });
    }
  }

 private:
  void read_four(const float* from) {
    for_each_vector(channels, [&](int64_t c, auto count) {
      if constexpr (std::is_same_v<decltype(count), Whole>) {
        Vec rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = load(from + 4 * c + i * kLanes, Whole());
        const auto low = at::vec::deinterleave2(rows[0], rows[1]), high = at::vec::deinterleave2(rows[2], rows[3]);
        const auto even = at::vec::deinterleave2(low.first, high.first);
        const auto odd = at::vec::deinterleave2(low.second, high.second);
        for (const auto& [i, factor] : {std::pair(0, even.first), {1, odd.first}, {2, even.second}, {3, odd.second}}) {
          store(factors.get() + i * channels + c, factor, Whole());
        }
      } else {
        for (int i = 0; i < 4; ++i) store(factors.get() + i * channels + c, gather(from + i, 4, c, count), count);
      }
    });
  }
};

// n elements that are `stride` apart, as float.
template <class Scalar>
inline void read_floats(const Scalar* from, int64_t stride, int64_t n, float* to) {
  for_each_vector(n, [=](int64_t i, auto count) {
    store(to + i, stride == 1 ? load(from + i, count) : gather(from, stride, i, count), count);
  });
}

}  // namespace moe_metal
