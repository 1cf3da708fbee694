// The op short_conv_. A thread computes some channels of a sequence, in blocks of tokens.
#include "cpu/linear_attention/convolution.h"
#include "ops.h"

namespace moe_metal {
namespace {

constexpr int64_t kBlockTokens = 64, kChannels = 256;

template <class Scalar>
struct Convolution {
  const ShortConv& call;
  const Tensor weight = as_float(call.weight), bias = as_float(call.bias);

  const Scalar* row(const Tensor& tensor, int64_t b, int64_t t, int64_t c) const {
    return elements<Scalar>(tensor) + b * tensor.stride(0) + t * tensor.stride(1) + c * tensor.stride(2);
  }

  // n channels of the convolution's input of one token, after its rounding. Tokens before the first one are in `past`.
  void read_input(int64_t b, int64_t t, int64_t c, int64_t n, float* factors, float* to) const {
    if (t < 0) {
      if (!call.past.defined()) return static_cast<void>(std::fill_n(to, n, 0.f));
      return read_floats(row(call.past, b, call.before() + t, c), call.past.stride(2), n, to);
    }
    read_floats(row(call.x, b, t, c), call.x.stride(2), n, to);
    if (!call.input_gate.defined()) return;
    read_floats(row(call.input_gate, b, t, c), call.input_gate.stride(2), n, factors);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(Scalar(to[i] * factors[i]));
  }

  // Channels [c, c + n) of tokens [t, t + T) of a sequence.
  void compute(int64_t b, int64_t t, int64_t T, int64_t c, const Taps& taps, float* memory) const {
    const int64_t n = taps.channels;
    float *factors = memory, *output = factors + n, *rows = output + T * n;
    for (int64_t i = 0; i < call.before() + T; ++i) {
      read_input(b, t + i - call.before(), c, n, factors, rows + i * n);
    }
    taps.convolve(rows, T, call.dilation, call.activation, output, n);
    for (int64_t i = 0; i < T; ++i) {
      const Tensor& gate = call.output_gate;
      if (gate.defined()) read_floats(row(gate, b, t + i, c), gate.stride(2), n, factors);
      Scalar* to = call.output.mutable_data_ptr<Scalar>() + (b * call.T + t + i) * call.C + c;
      for_each_vector(n, [&](int64_t at, auto count) {
        const Vec x = load(output + i * n + at, count);
        store(to + at, gate.defined() ? x * load(factors + at, count) : x, count);
      });
    }
  }

  void write_kept(int64_t b, int64_t c, int64_t n, float* memory) const {
    const Tensor& kept = call.kept;
    for (int64_t r = 0; r < call.R; ++r) {
      const int64_t t = call.T - call.R + r;
      Scalar* to = kept.mutable_data_ptr<Scalar>() + b * kept.stride(0) + r * kept.stride(1) + c * kept.stride(2);
      read_input(b, t, c, n, memory, memory + n);
      for (int64_t i = 0; i < n; ++i) to[i * kept.stride(2)] = static_cast<Scalar>(memory[n + i]);
    }
  }
};

template <class Scalar>
void compute(const ShortConv& call) {
  if (call.kept.defined()) call.kept.mutable_data_ptr();  // a lazy clone gets its own memory
  const Convolution<Scalar> convolution{call};
  const int64_t tiles = at::divup(call.C, kChannels), block = std::min(kBlockTokens, std::max<int64_t>(call.T, 1));
  const int64_t floats = (2 + 2 * block + call.before()) * kChannels;
  parallel_work_queue(call.B * tiles, [&](auto&& next_item) {
    const auto memory = scratch<float>(floats);
    for_each_item(next_item, call.B * tiles, [&](int64_t item, int64_t) {
      const int64_t b = item / tiles, c = item % tiles * kChannels, n = std::min(kChannels, call.C - c);
      const Taps taps(convolution.weight, convolution.bias, c, n);
      for (int64_t t = 0; t < call.T; t += block) {
        convolution.compute(b, t, std::min(block, call.T - t), c, taps, memory.get());
      }
      convolution.write_kept(b, c, n, memory.get());
    });
  });
}

}  // namespace

void cpu::run_short_conv_(const ShortConv& call) {
  with_dtype(call.x.scalar_type(), [&](auto scalar) { compute<decltype(scalar)>(call); });
}

}  // namespace moe_metal
