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

// The queries, keys or values of a call.
template <class Scalar>
struct Heads {
  const Rope& rope;
  const RopeHeads& call;
  int64_t count, D, R, pairs;
  bool norms_all, norms_first, norms_last;
  std::vector<float> weight;  // in the order in which it multiplies, or empty

  Heads(const Rope& rope, const RopeHeads& heads)
      : rope(rope),
        call(heads),
        count(heads.heads),
        D(heads.D),
        R(heads.R),
        pairs(rope.interleaved ? heads.R : 0),
        norms_all(heads.norm == RopeNorm::all_heads),
        norms_first(heads.norm != RopeNorm::none && !rope.norms_last),
        norms_last(heads.norm != RopeNorm::none && rope.norms_last) {
    if (heads.norm == RopeNorm::none) return;
    weight.assign(heads.norm_weight.defined() ? heads.norm_weight.numel() : D, 1);
    if (!heads.norm_weight.defined()) return;
    for (size_t at = 0; at < weight.size(); at += D) read_row(heads.norm_weight, at, 1, D, pairs, &weight[at]);
  }
  // How many floats `rotate` needs.
  int64_t scratch() const { return (count + 1) * D; }

  // Rotates all heads of a token. If their elements are not in the order in which pairs are computed, they are copied
  // to `floats` in that order first.
  void rotate(int64_t b, int64_t t, const float* cos, const float* sin, float* floats) const {
    if (!count) return;
    const auto& in = call.input;
    const auto* from = elements<Scalar>(in) + b * in.stride(0) + t * in.stride(1);
    auto* to = call.output.template mutable_data_ptr<Scalar>() + b * call.output.stride(0) + t * call.output.stride(2);
    float* turned = floats + count * D;
    if (in.stride(3) == 1 && pairs == 0) return rotate_rows(from, in.stride(2), cos, sin, to, turned);
    for (int64_t h = 0; h < count; ++h) read_row(from + h * in.stride(2), in.stride(3), D, pairs, floats + h * D);
    rotate_rows(floats, D, cos, sin, to, turned);
  }

  template <class From>
  void rotate_rows(const From* from, int64_t stride, const float* cos, const float* sin, Scalar* to,
                   float* turned) const {
    float scale = 1;
    if (norms_all) {
      float squares = 0;
      for (int64_t h = 0; h < count; ++h) squares += sum_of_squares(from + h * stride, D);
      scale = 1 / std::sqrt(squares / static_cast<float>(count * D) + rope.eps);
    }
    for (int64_t h = 0; h < count; ++h) {
      const From* row = from + h * stride;
      Scalar* out = to + h * call.output.stride(1);
      const float* factors = weight.data() + (norms_all ? h * D : 0);
      const auto write = [&](auto* to) {
        if (!norms_first) {
          const Vec factor(call.scale);
          rotate_row([=](int64_t i, auto count) { return load(row + i, count) * factor; }, cos, sin, to);
        } else {
          const Vec normed(norms_all ? scale : inv_rms(row, D, rope.eps));
          rotate_row([=](int64_t i, auto count) { return load(row + i, count) * normed * load(factors + i, count); },
                     cos, sin, to);
        }
      };
      if (!norms_last && !rope.pairs_stay) {
        write(out);
      } else {
        write(turned);
        norms_last ? write_normed(turned, out) : write_pairs(turned, out);
      }
    }
  }

  template <class Value, class To>
  void rotate_row(Value&& value, const float* cos, const float* sin, To* out) const {
    for_each_vector(R, [&](int64_t i, auto count) {
      const Vec a = value(i, count), b = value(R + i, count), c = load(cos + i, count), s = load(sin + i, count);
      store(out + i, a * c - b * s, count);
      store(out + R + i, b * c + a * s, count);
    });
    for_each_vector(D - 2 * R, [&](int64_t i, auto count) { store(out + 2 * R + i, value(2 * R + i, count), count); });
  }

  void write_normed(const float* turned, Scalar* out) const {
    const Vec scale(inv_rms(turned, D, rope.eps));
    for_each_vector(D, [&](int64_t i, auto count) {
      store(out + i, load(turned + i, count) * scale * load(weight.data() + i, count), count);
    });
  }
  // Pairs become neighbours again.
  void write_pairs(const float* turned, Scalar* out) const {
    for (int64_t i = 0; i < R; ++i) {
      out[2 * i] = static_cast<Scalar>(turned[i]), out[2 * i + 1] = static_cast<Scalar>(turned[R + i]);
    }
    for_each_vector(D - 2 * R, [&](int64_t i, auto n) { store(out + 2 * R + i, load(turned + 2 * R + i, n), n); });
  }
};

template <class Scalar>
void rows(const Rope& call) {
  const Heads<Scalar> q(call, call.q), k(call, call.k), v(call, call.v), q_first(call, call.q_first);
  const int64_t R = call.q.R;
  const auto read_angles = [&](const Tensor& angles, int64_t b, int64_t t, float* to) {
    if (R > 0) read_row(angles, b * angles.stride(0) + t * angles.stride(1), angles.stride(2), R, 0, to);
  };
  int64_t work = 0, scratch = 0;
  for (const auto* heads : {&q, &k, &v, &q_first}) {
    work += 2 * heads->count * heads->D, scratch = std::max(scratch, heads->scratch());
  }
  for_each_row(call.B * call.T, work, 2 * R + scratch, [&](int64_t row, float* floats) {
    const int64_t b = row / call.T, t = row % call.T;
    float *cos = floats, *sin = cos + R, *in_order = sin + R;
    read_angles(call.cos, b, t, cos);
    read_angles(call.sin, b, t, sin);
    for (const auto* heads : {&q, &k, &v, &q_first}) heads->rotate(b, t, cos, sin, in_order);
  });
}

}  // namespace

void cpu::run_rope(const Rope& call) {
  with_dtype(call.q.input.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
