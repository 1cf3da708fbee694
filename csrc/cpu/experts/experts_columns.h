// `experts` with few tokens for weights with contiguous columns ([E, H, 2I] and [E, I, H]).
//
// Whole neighbouring columns are read twice as fast as a few rows of each. So threads divide the columns, and each
// computes partial sums of all rows:
//
//   partial[part, slot, r] = sum over the kPart columns c of a part of weight(r, c) * x[slot][c]
//
// The parts depend only on the shapes and their sums are added in order, so results do not depend on the threads.
#pragma once
#include "cpu/experts/experts.h"

namespace moe_metal {

constexpr int64_t kPart = 256;

// Dense weights with contiguous columns, and few slots: with many, the partial sums would be larger than the weights.
inline bool experts_fit_columns(const Experts& call) {
  const Weight &gate_up = call.gate_up, &down = call.down;
  return gate_up.format->is_dense() && down.format->is_dense() && gate_up.row == 1 && down.row == 1 &&
         gate_up.gap == 0 && gate_up.column != 1 && down.column != 1 && call.T * call.K <= 256;
}

// out[n][r] += weight(r, c) * x[n][c] for C columns: each sum is loaded and stored once for all of them.
template <int C, int N, class Scalar>
[[gnu::flatten]] inline void add_columns(const Scalar* weight, int64_t column, int64_t rows, const float* const* x,
                                         int64_t first, float* const* out) {
  constexpr bool kInRegisters = N * C <= kVectorRegisters / 2;  // otherwise x is loaded for each product
  Vec values[N][C];
  if constexpr (kInRegisters) {
    unrolled<N>([&](auto n) { unrolled<C>([&](auto c) { values[n][c] = Vec(x[n][first + c]); }); });
  }
  const Scalar* columns = weight + first * column;
  for_each_vector(rows, [&](int64_t r, auto count) __attribute__((always_inline)) {
    Vec sums[N];
    unrolled<N>([&](auto n) { sums[n] = Vec::loadu(out[n] + r, count); });
    unrolled<C>([&](auto c) {
      const Vec vec = load(columns + c * column + r, count);
      unrolled<N>([&](auto n) {
        if constexpr (!kInRegisters) values[n][c] = Vec(x[n][first + c]);
        sums[n] = at::vec::fmadd(vec, values[n][c], sums[n]);
      });
    });
    unrolled<N>([&](auto n) { sums[n].store(out[n] + r, count); });
  });
}

// N tokens times the columns [begin, end).
template <int N, class Scalar>
inline void multiply_columns(const Scalar* weight, int64_t column, int64_t rows, int64_t begin, int64_t end,
                             const float* const* x, float* const* out) {
  constexpr int C = 8;  // columns for which a sum is loaded and stored once
  for (int n = 0; n < N; ++n) std::fill_n(out[n], rows, 0.0f);
  int64_t c = begin;
  for (; c + C <= end; c += C) add_columns<C, N>(weight, column, rows, x, c, out);
  for (; c < end; ++c) add_columns<1, N>(weight, column, rows, x, c, out);
}

// The partial sums of one matrix per expert, for all slots.
struct Partial {
  const Slots& slots;
  int64_t parts, rows, columns, count;
  Tensor sums;  // [parts, T * K, rows]

  Partial(const Experts& call, const Slots& slots, int64_t rows, int64_t columns, const Tensor& like)
      : slots(slots), parts(at::divup(columns, kPart)), rows(rows), columns(columns), count(call.T * call.K) {
    sums = empty({parts, count, rows}, like.options().dtype(at::kFloat));
  }
  float* at(int64_t part, int64_t slot) const { return sums.mutable_data_ptr<float>() + (part * count + slot) * rows; }

  // x_of(slot) returns the input of a slot: `columns` floats.
  template <class Scalar, class XOf>
  void multiply(const Weight& weight, XOf&& x_of) const {
    const int64_t items = slots.used() * parts;
    parallel_work_queue(items, [&](auto next_item) {
      for (int64_t item = next_item(); item < items; item = next_item()) {
        const int64_t which = item / parts, part = item % parts;
        const Scalar* from = elements<Scalar>(weight.data) + slots.experts[which] * weight.expert;
        int64_t at = slots.begin[which];
        const auto tokens = [&](auto n) {
          const float* x[n];
          float* out[n];
          for (int64_t i = 0; i < n; ++i)
            x[i] = x_of(slots.order[at + i]), out[i] = this->at(part, slots.order[at + i]);
          multiply_columns<n>(from, weight.column, rows, part * kPart, std::min((part + 1) * kPart, columns), x, out);
          at += n;
        };
        while (at + 8 <= slots.begin[which + 1]) tokens(std::integral_constant<int, 8>());
        while (at + 4 <= slots.begin[which + 1]) tokens(std::integral_constant<int, 4>());
        while (at + 2 <= slots.begin[which + 1]) tokens(std::integral_constant<int, 2>());
        if (at < slots.begin[which + 1]) tokens(std::integral_constant<int, 1>());
      }
    });
  }

  // Adds up the parts, for `rows` rows of a slot.
  void read(int64_t slot, int64_t row, int64_t rows, float* to) const {
    for_each_vector(rows, [&](int64_t i, auto n) {
      Vec sum = load(at(0, slot) + row + i, n);
      for (int64_t part = 1; part < parts; ++part) sum = sum + load(at(part, slot) + row + i, n);
      store(to + i, sum, n);
    });
  }
};

// inner[slot, row ...] = act(gate) * up, for an item of rows
inline void activate_sums(const Experts& call, const Partial& both, int64_t expert, int64_t slot, int64_t row,
                          float* inner) {
  const int64_t rows = std::min(kRows, call.I - row);
  const GateUpBias bias(call, expert, row, rows);
  float gate[2 * kRows], up[kRows];
  if (call.row_stride == 2) {
    both.read(slot, 2 * row, 2 * rows, gate);
    separate(gate, up, rows);
  } else {
    both.read(slot, row, rows, gate);
    both.read(slot, call.I + row, rows, up);
  }
  activate_rows(call, gate, up, bias, rows, inner + slot * call.I + row);
}

template <class Scalar>
void experts_by_columns(const Experts& call, const Slots& slots) {
  const Tensor x = as_float(call.x), inner = empty({call.T * call.K, call.I}, x.options());
  const float* from = elements<float>(x);
  float* to = inner.mutable_data_ptr<float>();
  const Partial both(call, slots, 2 * call.I, call.H, x), down(call, slots, call.H, call.I, x);

  both.multiply<Scalar>(call.gate_up, [&](int64_t slot) { return from + slot / call.K * call.H; });
  const int64_t of_expert = at::divup(call.I, kRows), items = slots.used() * of_expert;
  parallel_work_queue(items, [&](auto next_item) {
    for (int64_t item = next_item(); item < items; item = next_item()) {
      const int64_t which = item / of_expert, row = item % of_expert * kRows;
      for (int64_t at = slots.begin[which]; at < slots.begin[which + 1]; ++at) {
        activate_sums(call, both, slots.experts[which], slots.order[at], row, to);
      }
    }
  });
  down.multiply<Scalar>(call.down, [&](int64_t slot) { return to + slot * call.I; });
  const int64_t outputs = at::divup(call.H, kRows);
  parallel_work_queue(outputs, [&](auto next_item) {
    OutputItem<Scalar> output(call, kRows);
    float sums[kRows] = {};
    for (int64_t item = next_item(); item < outputs; item = next_item()) {
      const int64_t row = item * kRows;
      output.start(row);
      for (int64_t which = 0; which < slots.used(); ++which) {
        output.expect(slots.experts[which], row);
        for (int64_t at = slots.begin[which]; at < slots.begin[which + 1]; ++at) {
          down.read(slots.order[at], row, std::min(kRows, call.H - row), sums);
          output.add(slots.order[at], sums);
        }
      }
      output.finish();
    }
  });
}

}  // namespace moe_metal
