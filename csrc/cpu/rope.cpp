#include "cpu/vector/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// Reads a row as float in the order of the output: the first `pairs` pairs are interleaved in memory and are
// separated.
template <class Scalar>
void read_row(const Scalar* row, int64_t stride, int64_t length, int64_t pairs, float* to) {
  for_each_vector(pairs, [=](int64_t i, auto count) {
    if (std::is_same_v<decltype(count), Whole> && stride == 1) {
      const auto apart = at::vec::deinterleave2(load(row + 2 * i, Whole()), load(row + 2 * i + kLanes, Whole()));
      store(to + i, apart.first, count);
      store(to + pairs + i, apart.second, count);
    } else {
      store(to + i, gather(row, 2 * stride, i, count), count);
      store(to + pairs + i, gather(row + stride, 2 * stride, i, count), count);
    }
  });
  row += 2 * pairs * stride, to += 2 * pairs;
  for_each_vector(length - 2 * pairs, [=](int64_t i, auto count) {
    store(to + i, stride == 1 ? load(row + i, count) : gather(row, stride, i, count), count);
  });
}

// The same for `length` elements of a parameter, from `offset` on.
void read_row(const Tensor& parameter, int64_t offset, int64_t stride, int64_t length, int64_t pairs, float* to) {
  with_dtype(parameter.scalar_type(),
             [&](auto scalar) { read_row(elements<decltype(scalar)>(parameter) + offset, stride, length, pairs, to); });
}

// The queries or the keys of a call.
template <class Scalar>
struct Heads {
  const RopeHeads& call;
  int64_t count, T, D, R, pairs;
  float eps;
  bool norms_all;
  std::vector<float> weight;  // in the order of the output, or empty

  Heads(const Rope& rope, const RopeHeads& heads)
      : call(heads),
        count(heads.heads),
        T(rope.T),
        D(rope.D),
        R(rope.R),
        pairs(rope.interleaved ? rope.R : 0),
        eps(rope.eps),
        norms_all(heads.norms_all()) {
    if (!heads.norm_weight.defined()) return;
    weight.resize(heads.norm_weight.numel());
    for (size_t at = 0; at < weight.size(); at += D) read_row(heads.norm_weight, at, 1, D, pairs, &weight[at]);
  }

  static Scalar* row_of(const Tensor& output, int64_t b, int64_t t) {
    return output.template mutable_data_ptr<Scalar>() + b * output.stride(0) + t * output.stride(2);
  }

  // Rotates all heads of a token. If their elements are not in the order of the output, they are copied to `floats` in
  // that order first.
  void rotate(int64_t b, int64_t t, const float* cos, const float* sin, float* floats) const {
    const auto& in = call.input;
    const auto* from = elements<Scalar>(in) + b * in.stride(0) + t * in.stride(1);
    auto* to = row_of(call.output, b, t);
    if (in.stride(3) == 1 && pairs == 0) return rotate_rows(from, in.stride(2), cos, sin, to);
    for (int64_t h = 0; h < count; ++h) read_row(from + h * in.stride(2), in.stride(3), D, pairs, floats + h * D);
    rotate_rows(floats, D, cos, sin, to);
  }

  template <class From>
  void rotate_rows(const From* from, int64_t stride, const float* cos, const float* sin, Scalar* to) const {
    float scale = 1;
    if (norms_all) {
      float squares = 0;
      for (int64_t h = 0; h < count; ++h) squares += sum_of_squares(from + h * stride, D);
      scale = 1 / std::sqrt(squares / static_cast<float>(count * D) + eps);
    }
    for (int64_t h = 0; h < count; ++h) {
      const From* row = from + h * stride;
      Scalar* out = to + h * call.output.stride(1);
      if (weight.empty()) {
        rotate_row([=](int64_t i, auto count) { return load(row + i, count); }, cos, sin, out);
      } else {
        const float* factors = weight.data() + (norms_all ? h * D : 0);
        const Vec normed(norms_all ? scale : inv_rms(row, D, eps));
        rotate_row([=](int64_t i, auto count) { return load(row + i, count) * normed * load(factors + i, count); }, cos,
                   sin, out);
      }
    }
  }

  template <class Value>
  void rotate_row(Value&& value, const float* cos, const float* sin, Scalar* out) const {
    for_each_vector(R, [&](int64_t i, auto count) {
      const Vec a = value(i, count), b = value(R + i, count), c = load(cos + i, count), s = load(sin + i, count);
      store(out + i, a * c - b * s, count);
      store(out + R + i, b * c + a * s, count);
    });
    for_each_vector(D - 2 * R, [&](int64_t i, auto count) { store(out + 2 * R + i, value(2 * R + i, count), count); });
  }
};

// Copies the values of a token.
template <class Scalar>
void copy_values(const Rope& call, int64_t b, int64_t t) {
  const Tensor &from = call.v, &to = call.v_output;
  const int64_t size = to.size(3), step = from.stride(3);
  for (int64_t h = 0; h < call.k.heads; ++h) {
    const auto* row = elements<Scalar>(from) + b * from.stride(0) + t * from.stride(1) + h * from.stride(2);
    Scalar* out = Heads<Scalar>::row_of(to, b, t) + h * to.stride(1);
    if (step == 1) {
      std::copy_n(row, size, out);
    } else {
      for (int64_t i = 0; i < size; ++i) out[i] = row[i * step];
    }
  }
}

template <class Scalar>
void rows(const Rope& call) {
  const Heads<Scalar> q(call, call.q), k(call, call.k);
  const int64_t heads = q.count + k.count, R = call.R;
  const auto read_angles = [&](const Tensor& angles, int64_t b, int64_t t, float* to) {
    read_row(angles, b * angles.stride(0) + t * angles.stride(1), angles.stride(2), R, 0, to);
  };
  for_each_row(call.B * call.T, 2 * heads * call.D, 2 * R + std::max(q.count, k.count) * call.D,
               [&](int64_t row, float* floats) {
                 const int64_t b = row / call.T, t = row % call.T;
                 float *cos = floats, *sin = cos + R, *in_order = sin + R;
                 read_angles(call.cos, b, t, cos);
                 read_angles(call.sin, b, t, sin);
                 q.rotate(b, t, cos, sin, in_order);
                 k.rotate(b, t, cos, sin, in_order);
                 if (call.v.defined()) copy_values<Scalar>(call, b, t);
               });
}

}  // namespace

void cpu::run_rope(const Rope& call) {
  with_dtype(call.q.input.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
