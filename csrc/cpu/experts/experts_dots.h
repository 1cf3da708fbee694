// `experts` for weights of any format, dtype and strides, on any processor, with the products of
// weights/weight_rows.h.
#pragma once
#include "cpu/experts/experts.h"
#include "cpu/plan.h"
#include "cpu/weights/weight_rows.h"

namespace moe_metal {

// A panel, if experts have many tokens.
inline std::optional<Panel> panel(const Slots& slots) {
  const bool many = static_cast<int64_t>(slots.order.size()) >= kWorthTransposing * slots.used();
  return many ? std::make_optional<Panel>() : std::nullopt;
}

// Multiplies rows of gate_up of one expert by x, as float: inner[slot, row ...] = act(gate) * up
class GateUpDots {
 public:
  GateUpDots(const Experts& call, const Slots& slots, const float* x, const PreparedTokens* prepared, float* inner)
      : call_(call),
        slots_(slots),
        x_(x),
        prepared_(prepared),
        inner_(inner),
        both_(scratch<float>(kTokens * 2 * kRows)),
        rows_(rows_of(call.gate_up, call.x.scalar_type() == at::kBFloat16)),
        panel_(panel(slots)) {}

  // Item i is block i % blocks of the rows of the expert i / blocks.
  static int64_t blocks(const Experts& call) { return at::divup(call.I, kRows); }

  void operator()(int64_t item, int64_t next) {
    const int64_t which = item / blocks(call_);
    const auto [expert, row, rows] = rows_of_item(item);
    const RowRange following = rows_of_item(next);
    const GateUpBias bias(call_, expert, row, rows);
    for (int64_t at = slots_.begin[which]; at < slots_.begin[which + 1]; at += at_once_) {
      const int64_t* slots = slots_.order.data() + at;
      const int64_t count = std::min(at_once_, slots_.begin[which + 1] - at);
      multiply(expert, row, rows, following, slots, count);
      for (int64_t n = 0; n < count; ++n) {
        const float* both = both_.get() + n * 2 * kRows;
        activate_rows(call_, both, both + kRows, bias, rows, inner_ + slots[n] * call_.I + row);
      }
    }
  }

 private:
  // Empty past the last item.
  RowRange rows_of_item(int64_t item) const {
    const int64_t which = item / blocks(call_), row = item % blocks(call_) * kRows;
    return which < slots_.used() ? RowRange{slots_.experts[which], row, std::min(kRows, call_.I - row)} : RowRange();
  }

  // both[n] = kRows of gate, then kRows of up
  void multiply(int64_t expert, int64_t row, int64_t rows, const RowRange& next, const int64_t* slots, int64_t count) {
    const float* from[kTokens];
    float *gate[kTokens], *up[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = x_ + slots[n] / call_.K * call_.H;
      gate[n] = both_.get() + n * 2 * kRows;
      up[n] = gate[n] + kRows;
    }
    if (call_.row_stride == 2) {  // interleaved: gate and up are contiguous rows
      const RowRange both = {next.expert, 2 * next.first, 2 * next.count};
      rows_->product({expert, 2 * row, 2 * rows}, both, {from, gate, count, prepared_}, panel_);
      for (int64_t n = 0; n < count; ++n) separate(gate[n], up[n], rows);
    } else {
      const RowRange of_gate = {expert, row, rows}, of_up = {expert, call_.up_row_offset + row, rows};
      rows_->product(of_gate, of_up, {from, gate, count, prepared_}, panel_);
      rows_->product(of_up, next, {from, up, count, prepared_}, panel_);
    }
  }

  const Experts& call_;
  const Slots& slots_;
  const float* x_;
  const PreparedTokens* prepared_;
  float* inner_;
  const std::unique_ptr<float[], Free> both_;
  const std::unique_ptr<WeightRows> rows_;
  std::optional<Panel> panel_;
  const int64_t at_once_ = panel_ ? kTokens : kTokensByRows;
};

// Computes one block of the output: the weighted sum over all experts of their products with down.
template <class Scalar>
class DownDots {
 public:
  DownDots(const Experts& call, const Slots& slots, const float* inner, const PreparedTokens* prepared, int64_t size)
      : call_(call),
        slots_(slots),
        inner_(inner),
        prepared_(prepared),
        size_(size),
        output_(call, size),
        results_(scratch<float>(kTokens * kRows)),
        rows_(rows_of(call.down, inner_may_be_rounded(call))),
        panel_(panel(slots)) {}

  // `next`: the first row of the block that this thread computes afterwards.
  void operator()(int64_t first, int64_t next) {
    output_.start(first);
    for (int64_t which = 0; which < slots_.used(); ++which) {
      for (int64_t row = first; row < std::min(first + size_, call_.H); row += kRows) {
        output_.expect(slots_.experts[which], row);
        const RowRange rows = rows_at(which, row);
        const RowRange following = next_after(which, row, first, next);
        for (int64_t at = slots_.begin[which]; at < slots_.begin[which + 1]; at += at_once_) {
          const int64_t count = std::min(at_once_, slots_.begin[which + 1] - at);
          add(rows, following, slots_.order.data() + at, count);
        }
      }
    }
    output_.finish();
  }

 private:
  RowRange next_after(int64_t which, int64_t row, int64_t first, int64_t next) const {
    if (row + kRows < std::min(first + size_, call_.H)) return rows_at(which, row + kRows);
    if (which + 1 < slots_.used()) return rows_at(which + 1, first);
    return next < call_.H ? rows_at(0, next) : RowRange();
  }
  RowRange rows_at(int64_t which, int64_t row) const {
    return {slots_.experts[which], row, std::min(kRows, call_.H - row)};
  }

  void add(const RowRange& rows, const RowRange& next, const int64_t* slots, int64_t count) {
    const float* from[kTokens];
    float* to[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = inner_ + slots[n] * call_.I;
      to[n] = results_.get() + n * kRows;
    }
    rows_->product(rows, next, {from, to, count, prepared_}, panel_);
    for (int64_t n = 0; n < count; ++n) output_.add(slots[n], to[n]);
  }

  const Experts& call_;
  const Slots& slots_;
  const float* inner_;
  const PreparedTokens* prepared_;
  const int64_t size_;
  OutputBlock<Scalar> output_;
  const std::unique_ptr<float[], Free> results_;
  const std::unique_ptr<WeightRows> rows_;
  std::optional<Panel> panel_;
  const int64_t at_once_ = panel_ ? kTokens : kTokensByRows;
};

template <class Scalar>
void experts_by_dots(const Experts& call, const Slots& slots) {
  const Tensor x = as_float(call.x), inner = empty({call.T * call.K, call.I}, x.options());
  const bool many = std::ssize(slots.order) >= kWorthPreparing * slots.used();
  const auto prepared_x = many && call.x.scalar_type() == at::kBFloat16 ? prepare_tokens(call.gate_up, x) : nullptr;
  const int64_t items = slots.used() * GateUpDots::blocks(call);
  parallel_work_queue(items, [&](auto next_item) {
    GateUpDots work(call, slots, elements<float>(x), prepared_x.get(), inner.mutable_data_ptr<float>());
    for_each_item(next_item, items, [&](int64_t item, int64_t next) { work(item, next); });
  });
  const auto prepared_inner = many && inner_may_be_rounded(call) ? prepare_tokens(call.down, inner) : nullptr;
  const int64_t size = output_block(call), outputs = at::divup(call.H, size);
  parallel_work_queue(outputs, [&](auto next_item) {
    DownDots<Scalar> work(call, slots, elements<float>(inner), prepared_inner.get(), size);
    for_each_item(next_item, outputs, [&](int64_t item, int64_t next) { work(item * size, next * size); });
  });
}

}  // namespace moe_metal
