// The whole expert FFN of a MoE layer and its combine: see `experts` in torch_moe_metal/reference.py.
//
// Three passes, each one parallel region over (expert, block of rows), so that every weight is read once, from where
// it lies, by one thread:
//   1. inner[slot, i] = act(gate_up[e] @ x[t] + bias)      a slot is one of a token's K choices of an expert
//   2. slots[slot, h] = down[e] @ inner[slot] + bias
//   3. output[t, h]   = sum_k weights * slots + sigmoid(shared_gate) * shared + residual
// Sums are float and are rounded once, in pass 3. Scratch: T * K * (H + I) floats, and T * H for x as float.
//
// Threads take blocks from a counter, so that a core slowed by other work delays no one. Which thread takes a block
// changes no bit of its result.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "activation.h"
#include "contract.h"
#include "experts_product.h"

namespace moe_metal {
namespace {

// The slots that each expert has to serve. Slots whose id is outside [0, E) are nobody's.
struct Groups {
  std::vector<int64_t> slots;    // all slots, those of one expert side by side, in rising order
  std::vector<int64_t> experts;  // those that have slots
  std::vector<int64_t> begin;    // of each of these experts in `slots`, and one last end

  Groups(const int64_t* ids, int64_t count, int64_t E) {
    std::vector<int64_t> next(E + 1, 0);
    const auto used = [&](int64_t slot) { return 0 <= ids[slot] && ids[slot] < E; };
    for (int64_t slot = 0; slot < count; ++slot) {
      if (used(slot)) ++next[ids[slot] + 1];
    }
    for (int64_t e = 0; e < E; ++e) {
      if (next[e + 1] > 0) experts.push_back(e);
      if (next[e + 1] > 0) begin.push_back(next[e]);
      next[e + 1] += next[e];
    }
    begin.push_back(next[E]);
    slots.resize(next[E]);
    for (int64_t slot = 0; slot < count; ++slot) {
      if (used(slot)) slots[next[ids[slot]]++] = slot;
    }
  }
};

// worker(next) on every thread, where next() gives the items 0 .. count-1 to whoever asks first, and then count.
template <class Worker>
void share(int64_t count, Worker&& worker) {
  std::atomic<int64_t> taken = 0;
  const auto next = [&] { return std::min(taken.fetch_add(1, std::memory_order_relaxed), count); };
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) { worker(next); });
}

// A block of rows of one expert, and some of the expert's slots.
constexpr int64_t kBlock = 64, kSlotsAtOnce = 64;

struct Slots {
  const int64_t* ids;
  int64_t count;
};

// work(expert, first row, rows, slots) for each block of each expert's `rows` rows.
template <class Work>
void for_each_block(const Groups& groups, int64_t rows, Work&& work) {
  const int64_t blocks = at::divup(rows, kBlock), count = blocks * static_cast<int64_t>(groups.experts.size());
  share(count, [&](auto next) {
    auto own = work;  // with scratch of its own
    for (int64_t item = next(); item < count; item = next()) {
      const int64_t group = item / blocks, row = item % blocks * kBlock;
      for (int64_t at = groups.begin[group]; at < groups.begin[group + 1]; at += kSlotsAtOnce) {
        const int64_t slots = std::min(kSlotsAtOnce, groups.begin[group + 1] - at);
        own(groups.experts[group], row, std::min(kBlock, rows - row), Slots{groups.slots.data() + at, slots});
      }
    }
  });
}

void add_bias(const Tensor& bias, int64_t offset, int64_t count, float* to) {
  if (!bias.defined()) return;
  with_dtype(bias.scalar_type(), [&](auto scalar) {
    const auto* from = static_cast<const decltype(scalar)*>(bias.const_data_ptr()) + offset;
    for_each_vector(count, [&](int64_t i, auto n) { store(to + i, load(to + i, n) + load(from + i, n), n); });
  });
}

// Pass 1. Its blocks are of rows of `inner`: a gate row and an up row each.
template <class Scalar>
struct GateUp {
  const Experts& call;
  const float* x;
  float* inner;
  std::vector<float> both = std::vector<float>(kSlotsAtOnce * 2 * kBlock);

  void operator()(int64_t expert, int64_t row, int64_t rows, const Slots& slots) {
    const float* from[kSlotsAtOnce];
    float* gate[kSlotsAtOnce];
    float* up[kSlotsAtOnce];
    for (int64_t n = 0; n < slots.count; ++n) {
      from[n] = x + slots.ids[n] / call.K * call.H;
      gate[n] = both.data() + n * 2 * kBlock;
      up[n] = gate[n] + kBlock;
    }
    const Scalar* gate_up = call.gate_up.const_data_ptr<Scalar>() + expert * call.gate_up_strides.expert;
    const int64_t bias = expert * 2 * call.I;
    if (call.bias_stride == 2) {  // interleaved: gate and up rows are one run of rows
      Matrix<Scalar> weight{gate_up, call.up_offset, call.gate_up_strides.column, 2 * rows, call.H};
      weight.data += 2 * row * weight.row;
      product(weight, {from, gate, slots.count});
      for (int64_t n = 0; n < slots.count; ++n) {
        add_bias(call.gate_up_bias, bias + 2 * row, 2 * rows, gate[n]);
        separate(gate[n], rows);
      }
    } else {
      Matrix<Scalar> weight{gate_up, call.gate_up_strides.row, call.gate_up_strides.column, rows, call.H};
      weight.data += row * weight.row;
      product(weight, {from, gate, slots.count});
      weight.data += call.up_offset;
      product(weight, {from, up, slots.count});
      for (int64_t n = 0; n < slots.count; ++n) {
        add_bias(call.gate_up_bias, bias + row, rows, gate[n]);
        add_bias(call.gate_up_bias, bias + call.I + row, rows, up[n]);
      }
    }
    for (int64_t n = 0; n < slots.count; ++n) activate(gate[n], up[n], inner + slots.ids[n] * call.I + row, rows);
  }

  static void separate(float* both, int64_t rows) {
    float up[kBlock];
    for (int64_t i = 0; i < rows; ++i) {
      up[i] = both[2 * i + 1];
      both[i] = both[2 * i];
    }
    std::copy_n(up, rows, both + kBlock);
  }

  void activate(const float* gate, const float* up, float* to, int64_t rows) {
    with_activation(call.params.activation, [&](auto activation) {
      for_each_vector(rows, [&](int64_t i, auto n) {
        store(to + i, activated<decltype(activation)::value>(load(gate + i, n), load(up + i, n), call.params), n);
      });
    });
  }
};

// Pass 2. Its blocks are of rows of `down`.
template <class Scalar>
struct Down {
  const Experts& call;
  const float* inner;
  float* outputs;

  void operator()(int64_t expert, int64_t row, int64_t rows, const Slots& slots) {
    const float* from[kSlotsAtOnce];
    float* to[kSlotsAtOnce];
    for (int64_t n = 0; n < slots.count; ++n) {
      from[n] = inner + slots.ids[n] * call.I;
      to[n] = outputs + slots.ids[n] * call.H + row;
    }
    Matrix<Scalar> weight{call.down.const_data_ptr<Scalar>(), call.down_strides.row, call.down_strides.column, rows,
                          call.I};
    weight.data += expert * call.down_strides.expert + row * weight.row;
    product(weight, {from, to, slots.count});
    for (int64_t n = 0; n < slots.count; ++n) add_bias(call.down_bias, expert * call.H + row, rows, to[n]);
  }
};

template <class Scalar>
const Scalar* row_of(const Tensor& tensor, int64_t token, int64_t H) {
  return tensor.defined() ? tensor.const_data_ptr<Scalar>() + token * H : nullptr;
}

// Pass 3, for one token. A weight beside an id outside [0, E) is never looked at: it may be NaN.
template <class Scalar>
void combine(const Experts& call, int64_t token, const int64_t* ids, const float* weights, const float* slots) {
  const Scalar* shared = row_of<Scalar>(call.shared, token, call.H);
  const Scalar* residual = row_of<Scalar>(call.residual, token, call.H);
  const float logit = call.shared_gate.defined() ? call.shared_gate.const_data_ptr<float>()[token] : 0;
  const Vec shared_weight(call.shared_gate.defined() ? 1 / (1 + std::exp(-logit)) : 1);
  Scalar* output = call.output.mutable_data_ptr<Scalar>() + token * call.H;
  for_each_vector(call.H, [&](int64_t h, auto count) {
    Vec sum(0);
    for (int64_t k = 0; k < call.K; ++k) {
      if (ids[k] < 0 || ids[k] >= call.E) continue;
      sum = at::vec::fmadd(Vec(weights[k]), load(slots + k * call.H + h, count), sum);
    }
    if (shared) sum = at::vec::fmadd(shared_weight, load(shared + h, count), sum);
    if (residual) sum = sum + load(residual + h, count);
    store(output + h, sum, count);
  });
}

template <class Scalar>
void run(const Experts& call) {
  const Tensor x = call.x.to(at::kFloat), weights = call.weights.to(at::kFloat), ids = call.experts.to(at::kLong);
  const int64_t count = call.T * call.K;
  const Groups groups(ids.const_data_ptr<int64_t>(), count, call.E);
  const Tensor inner = at::empty({count, call.I}, x.options()), slots = at::empty({count, call.H}, x.options());
  float *to_inner = inner.mutable_data_ptr<float>(), *to_slots = slots.mutable_data_ptr<float>();
  for_each_block(groups, call.I, GateUp<Scalar>{call, x.const_data_ptr<float>(), to_inner});
  for_each_block(groups, call.H, Down<Scalar>{call, to_inner, to_slots});
  at::parallel_for(0, call.T, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      combine<Scalar>(call, t, ids.const_data_ptr<int64_t>() + t * call.K, weights.const_data_ptr<float>() + t * call.K,
                      to_slots + t * call.K * call.H);
    }
  });
}

Tensor experts(const Tensor& x, const Tensor& weights, const Tensor& experts, const Tensor& gate_up, const Tensor& down,
               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, const OptionalTensor& shared,
               const OptionalTensor& shared_gate, const OptionalTensor& residual, std::string_view activation,
               double alpha, std::optional<double> limit, bool interleaved, bool transposed) {
  Experts call = experts_arguments(x, weights, experts, gate_up, down, gate_up_bias, down_bias, shared, shared_gate,
                                   residual, activation, alpha, limit, interleaved, transposed);
  if (call.T == 0) return call.output;
  if (call.shared_gate.defined()) call.shared_gate = call.shared_gate.to(at::kFloat);
  with_dtype(call.x.scalar_type(), [&](auto scalar) { run<decltype(scalar)>(call); });
  return call.output;
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("experts", &moe_metal::experts); }
