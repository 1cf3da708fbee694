// `experts` for weights of any format, dtype and strides, on any processor, with the products of
// weights/weight_rows.h.
#pragma once
#include "cpu/experts/experts.h"
#include "cpu/plan.h"
#include "cpu/weights/weight_rows.h"

namespace moe_metal {

// A panel, if experts have many tokens.
inline std::optional<Panel> panel(const Slots& slots) {
  const bool many = std::ssize(slots.order) >= kWorthTransposing * slots.used();
  return many ? std::make_optional<Panel>() : std::nullopt;
}

// Multiplies rows of gate_up of one expert by x, as float: inner[slot, row ...] = act(gate) * up
class GateUpDots {
 public:
  GateUpDots(const Experts& call, const Slots& slots, const float* x, const PreparedTokens* prepared, int64_t size,
             float* inner)
      : call_(call),
        slots_(slots),
        x_(x),
        prepared_(prepared),
        inner_(inner),
        size_(size),
        of_expert_(at::divup(call.I, size)),
        both_(scratch<float>(kTokens * 2 * size_)),
        rows_(rows_of(call.gate_up, call.x.scalar_type() == at::kBFloat16)),
        panel_(panel(slots)) {}

  // The rows of gate, and of up, of a work item. Up to 128 of them use each part of the tokens again while it is in the
  // cache: 32 tokens of 128 experts take 0.95 to 0.99 of the time of items of 32 rows (Zen 4).
  static int64_t rows_of_item(const Experts& call, const Slots& slots) {
    return rows_for_threads(call.I * slots.used(), 8, 4);
  }

  // Item i has rows of the expert i / of_expert_, and is number i % of_expert_ of its items.
  void operator()(int64_t item, int64_t next) {
    const int64_t which = item / of_expert_;
    const RowRange range = range_of(item), following = range_of(next);
    for (int64_t at = slots_.begin[which], count; at < slots_.begin[which + 1]; at += count) {
      const int64_t* slots = slots_.order.data() + at;
      count = even_part(slots_.begin[which + 1] - at, at_once_);
      multiply(range, following, slots, count);
      for (int64_t part = 0; part < range.count; part += kRows) activate(range, part, slots, count);
    }
  }

 private:
  // Empty past the last item.
  RowRange range_of(int64_t item) const {
    const int64_t which = item / of_expert_, row = item % of_expert_ * size_;
    return which < slots_.used() ? RowRange{slots_.experts[which], row, std::min(size_, call_.I - row)} : RowRange();
  }
  bool interleaved() const { return call_.row_stride == 2; }

  // both[n] = size_ of gate, then size_ of up; or the rows of both alternate
  void multiply(const RowRange& range, const RowRange& next, const int64_t* slots, int64_t count) {
    const auto [expert, row, rows] = range;
    const float* from[kTokens];
    float *gate[kTokens], *up[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = x_ + slots[n] / call_.K * call_.H;
      gate[n] = both_.get() + n * 2 * size_;
      up[n] = gate[n] + size_;
    }
    if (interleaved()) {  // gate and up are contiguous rows
      const RowRange both = {next.expert, 2 * next.first, 2 * next.count};
      rows_->product({expert, 2 * row, 2 * rows}, both, {from, gate, count, prepared_}, panel_);
    } else {
      const RowRange of_gate = {expert, row, rows}, of_up = {expert, call_.up_row_offset + row, rows};
      rows_->product(of_gate, of_up, {from, gate, count, prepared_}, panel_);
      rows_->product(of_up, next, {from, up, count, prepared_}, panel_);
    }
  }

  // Up to kRows rows of each token, from `part` of the range on.
  void activate(const RowRange& range, int64_t part, const int64_t* slots, int64_t count) {
    const int64_t row = range.first + part, rows = std::min(kRows, range.count - part);
    const GateUpBias bias(call_, range.expert, row, rows);
    for (int64_t n = 0; n < count; ++n) {
      float* both = both_.get() + n * 2 * size_;
      float *gate = both + part, *up = gate + size_;
      if (interleaved()) {
        gate = both + 2 * part, up = gate + kRows;
        separate(gate, up, rows);
      }
      activate_rows(call_, gate, up, bias, rows, inner_ + slots[n] * call_.I + row);
    }
  }

  const Experts& call_;
  const Slots& slots_;
  const float* x_;
  const PreparedTokens* prepared_;
  float* inner_;
  const int64_t size_, of_expert_;
  const std::unique_ptr<float[], Free> both_;
  const std::unique_ptr<WeightRows> rows_;
  std::optional<Panel> panel_;
  const int64_t at_once_ = panel_ ? kTokens : kTokensByRows;
};

// Computes one item of the output: the weighted sum over all experts of their products with down.
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
        results_(scratch<float>(kTokens * size)),
        rows_(rows_of(call.down, inner_may_be_rounded(call))),
        panel_(panel(slots)) {}

  // `next`: the first row of the item that this thread computes afterwards.
  void operator()(int64_t first, int64_t next) {
    output_.start(first);
    for (int64_t which = 0; which < slots_.used(); ++which) {
      const RowRange range = range_of(which, first);
      const RowRange following = which + 1 < slots_.used() ? range_of(which + 1, first) : range_of(0, next);
      for (int64_t at = slots_.begin[which], count; at < slots_.begin[which + 1]; at += count) {
        count = even_part(slots_.begin[which + 1] - at, at_once_);
        add(range, following, slots_.order.data() + at, count);
      }
    }
    output_.finish();
  }

 private:
  // Empty past the last item.
  RowRange range_of(int64_t which, int64_t first) const {
    return {slots_.experts[which], first, std::clamp<int64_t>(call_.H - first, 0, size_)};
  }

  void add(const RowRange& range, const RowRange& next, const int64_t* slots, int64_t count) {
    const float* from[kTokens];
    float* to[kTokens];
    for (int64_t n = 0; n < count; ++n) {
      from[n] = inner_ + slots[n] * call_.I;
      to[n] = results_.get() + n * size_;
    }
    rows_->product(range, next, {from, to, count, prepared_}, panel_);
    for (int64_t part = 0; part < range.count; part += kRows) {
      output_.expect(range.expert, range.first + part);
      for (int64_t n = 0; n < count; ++n) output_.add(slots[n], to[n] + part);
    }
  }

  const Experts& call_;
  const Slots& slots_;
  const float* inner_;
  const PreparedTokens* prepared_;
  const int64_t size_;
  OutputItem<Scalar> output_;
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
  const int64_t rows = GateUpDots::rows_of_item(call, slots), items = slots.used() * at::divup(call.I, rows);
  parallel_work_queue(items, [&](auto next_item) {
    GateUpDots work(call, slots, elements<float>(x), prepared_x.get(), rows, inner.mutable_data_ptr<float>());
    for_each_item(next_item, items, [&](int64_t item, int64_t next) { work(item, next); });
  });
  const auto prepared_inner = many && inner_may_be_rounded(call) ? prepare_tokens(call.down, inner) : nullptr;
  const int64_t size = output_columns(call), outputs = at::divup(call.H, size);
  parallel_work_queue(outputs, [&](auto next_item) {
    DownDots<Scalar> work(call, slots, elements<float>(inner), prepared_inner.get(), size);
    for_each_item(next_item, outputs, [&](int64_t item, int64_t next) { work(item * size, next * size); });
  });
}

}  // namespace moe_metal
