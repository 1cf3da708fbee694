// Shared by the ways to compute `experts`: the slots of each expert, biases, activations, and the sums of an item
// of the output.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "contract/experts.h"
#include "cpu/activation.h"
#include "cpu/item_rows.h"
#include "cpu/vector/rows.h"

namespace moe_metal {

// Slot t * K + k is the k-th expert of token t. The token gets weights[slot] times its result. Slots with an id outside
// [0, E) are skipped: nothing of them is read.
struct Slots {
  std::vector<int64_t> order;    // slots sorted by expert, then by slot
  std::vector<int64_t> experts;  // the experts that have slots
  std::vector<int64_t> begin;    // where the slots of each of them begin in `order`, and the end of the last

  Slots(const Tensor& ids, int64_t E) {
    if (ids.scalar_type() == at::kInt)
      sort(elements<int32_t>(ids), ids.numel(), E);
    else
      sort(elements<int64_t>(ids), ids.numel(), E);
  }
  int64_t used() const { return static_cast<int64_t>(experts.size()); }

 private:
  template <class Id>
  void sort(const Id* id, int64_t count, int64_t E) {
    std::vector<int64_t> next(E + 1, 0);
    for (int64_t slot = 0; slot < count; ++slot) {
      if (0 <= id[slot] && id[slot] < E) ++next[id[slot] + 1];
    }
    for (int64_t e = 0; e < E; ++e) {
      if (next[e + 1] > 0) experts.push_back(e), begin.push_back(next[e]);
      next[e + 1] += next[e];
    }
    begin.push_back(next[E]);
    order.resize(next[E]);
    for (int64_t slot = 0; slot < count; ++slot) {
      if (0 <= id[slot] && id[slot] < E) order[next[id[slot]]++] = slot;
    }
  }
};

// Whether `inner`, the intermediate result, may be rounded to bfloat16: only if the activations are bfloat16, and not
// with tiny matrices, where rounding errors do not average out.
inline bool inner_may_be_rounded(const Experts& call) {
  return call.x.scalar_type() == at::kBFloat16 && std::min(call.H, call.I) >= 64;
}

// The biases of up to kRows rows of gate and of up, of one expert.
struct GateUpBias {
  float gate[kRows], up[kRows];
  GateUpBias(const Experts& call, int64_t expert, int64_t row, int64_t rows) {
    const int64_t first = expert * 2 * call.I + row * call.bias_stride;
    read_bias(call.gate_up_bias, first, call.bias_stride, rows, gate);
    read_bias(call.gate_up_bias, first + call.up_bias_offset, call.bias_stride, rows, up);
  }
};

// Separates interleaved results of gate and up rows: 2 * rows floats in `both` -> gate in `both`, up in `up`.
inline void separate(float* both, float* up, int64_t rows) {
  float gate[kRows], rest[kRows];
  for (int64_t i = 0; i < rows; ++i) {
    gate[i] = both[2 * i];
    rest[i] = both[2 * i + 1];
  }
  std::copy_n(gate, rows, both);
  std::copy_n(rest, rows, up);
}

inline void activate_rows(const Experts& call, const float* gate, const float* up, const GateUpBias& bias, int64_t rows,
                          float* to) {
  with_activation(call.params.activation, [&](auto activation) {
    for_each_vector(rows, [&](int64_t i, auto count) {
      const Vec g = load(gate + i, count) + load(bias.gate + i, count);
      const Vec u = load(up + i, count) + load(bias.up + i, count);
      store(to + i, activated<decltype(activation)::value>(g, u, call.params), count);
    });
  });
}

// How many columns of the output a work item has. With more columns, `inner` is read again less often. But every thread
// should get a few items, and the sums of an item should stay in its cache. 256 columns take 0.96 to 1.01 of the time
// of 128 with two threads (on an Intel, I = 768). With I = 2880, 512 tokens of mxfp4 took 1.05: there 128 are the most.
inline int64_t output_columns(const Experts& call) {
  return rows_for_threads(call.H, 4, std::clamp<int64_t>(items_in_half_of_l2(call.I), 4, 8));
}

// The sums of an item of the output, for every token. One thread adds the experts in their order, so there is
// no race and the order of each sum is fixed.
template <class Scalar>
class OutputItem {
 public:
  OutputItem(const Experts& call, int64_t size)
      : call_(call), size_(size), weights_(elements<float>(call.weights)), sums_(call.T * size) {}

  void start(int64_t first) {
    first_ = first;
    std::fill(sums_.begin(), sums_.end(), 0.0f);
  }
  // Announces results of this expert, for up to kRows rows of down from `row` on.
  void expect(int64_t expert, int64_t row) {
    row_ = row - first_;
    read_bias(call_.down_bias, expert * call_.H + row, 1, std::min(kRows, call_.H - row), bias_);
  }
  void add(int64_t slot, const float* results) {
    float* sums = sums_.data() + slot / call_.K * size_ + row_;
    // With many tokens the sums are not in the L1 cache. Those of the next rows will probably be needed next.
    for (int64_t i = kRows; i < 2 * kRows; i += kLanes) __builtin_prefetch(sums + i, 1, 2);
    const Vec weight(weights_[slot]);
    for (int64_t i = 0; i < kRows; i += kLanes) {
      at::vec::fmadd(weight, Vec::loadu(results + i) + Vec::loadu(bias_ + i), Vec::loadu(sums + i)).store(sums + i);
    }
  }

  // Adds `shared` and `residual`, and rounds each result, once.
  void finish() {
    for (int64_t t = 0; t < call_.T; ++t) {
      const int64_t at = t * call_.H + first_;
      const float* sums = sums_.data() + t * size_;
      const Vec shared_weight(sigmoid_of_shared_gate(t));
      for_each_vector(std::min(size_, call_.H - first_), [&](int64_t i, auto count) {
        Vec sum = load(sums + i, count);
        if (call_.shared.defined())
          sum = at::vec::fmadd(shared_weight, load(elements<Scalar>(call_.shared) + at + i, count), sum);
        if (call_.residual.defined()) sum = sum + load(elements<Scalar>(call_.residual) + at + i, count);
        store(call_.output.template mutable_data_ptr<Scalar>() + at + i, sum, count);
      });
    }
  }

 private:
  float sigmoid_of_shared_gate(int64_t token) const {
    return call_.shared_gate.defined() ? 1 / (1 + std::exp(-elements<float>(call_.shared_gate)[token])) : 1;
  }

  const Experts& call_;
  const int64_t size_;
  const float* weights_;
  std::vector<float> sums_;  // [T, size]
  float bias_[kRows];
  int64_t first_ = 0, row_ = 0;
};

}  // namespace moe_metal
