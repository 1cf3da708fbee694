// `attention` for any products: divides the work into tiles and parts, and combines the parts.
#pragma once
#include "cpu/attention/attention_tile.h"
#include "cpu/vector/rows.h"

namespace moe_metal {

// How the work is divided: tiles of rows for each sequence and key head. If there are too few tiles for many cores,
// their keys are divided into parts. This depends only on the sizes, so that results do not depend on the threads.
constexpr int64_t kMaxParts = 64;

struct Plan {
  int64_t group, rows, tiles, parts, items;

  explicit Plan(const Attention& call)
      : group(call.A / call.J), rows(group * call.T), tiles(at::divup(rows, kTileRows)) {
    constexpr int64_t kWorthAPart = 512;
    const int64_t seen = call.window > 0 ? std::min(call.S, call.window + call.T) : call.S;
    const int64_t most = std::max<int64_t>(at::divup(seen, kWorthAPart), 1);
    parts = std::clamp<int64_t>(at::divup(kMaxParts, call.B * call.J * tiles), 1, most);
    items = call.B * call.J * tiles * parts;
  }

  Span span(const Attention& call, int64_t item) const {
    const int64_t part = item % parts, tile = item / parts % tiles, head = item / parts / tiles;
    const int64_t first_row = tile * kTileRows, last_row = std::min(first_row + kTileRows, rows);
    const int64_t first = call.first_key(first_row / group), last = call.last_key((last_row - 1) / group);
    const int64_t keys = at::divup(at::divup(std::max<int64_t>(last - first, 0), parts), kKeys) * kKeys;
    const int64_t first_key = first + part * keys;
    return {head / call.J, head % call.J, first_row, last_row - first_row, first_key, std::min(first_key + keys, last)};
  }
};

// Combines the parts and the sink of a row to a row of the output.
template <class Scalar>
void write_row(const Sums* parts, int64_t count, float sink, int64_t V, Scalar* to) {
  if (std::all_of(parts, parts + count, [](const Sums& part) { return part.total == 0; })) {
    std::fill_n(to, V, Scalar(0));  // the row sees no key
    return;
  }
  float greatest = sink;
  for (int64_t p = 0; p < count; ++p) greatest = std::max(greatest, parts[p].greatest);
  float factors[kMaxParts], all = std::exp(sink - greatest);
  for (int64_t p = 0; p < count; ++p) {
    factors[p] = std::exp(parts[p].greatest - greatest);
    all += factors[p] * parts[p].total;
  }
  const Vec inverse(1 / all);
  for_each_vector(V, [&](int64_t v, auto columns) {
    Vec total(0);
    for (int64_t p = 0; p < count; ++p) {
      total = at::vec::fmadd(load(parts[p].values + v, columns), Vec(factors[p]), total);
    }
    store(to + v, total * inverse, columns);
  });
}

// Writes rows of the output, with their sinks.
template <class Scalar>
struct Output {
  const Attention& call;
  Tensor sinks;
  Scalar* data;

  explicit Output(const Attention& of)
      : call(of), sinks(as_float(of.sinks)), data(of.output.mutable_data_ptr<Scalar>()) {}

  void write(int64_t sequence, int64_t head, int64_t row, const Sums* parts, int64_t count) const {
    const int64_t group = call.A / call.J, a = head * group + row % group, t = row / group;
    const float sink = sinks.defined() ? elements<float>(sinks)[a] : -kInfinity;
    write_row(parts, count, sink, call.V, data + ((sequence * call.T + t) * call.A + a) * call.V);
  }
};

// Computes the call with these products: see FloatProducts.
template <class Products>
void attention_by_tiles(const Attention& call) {
  using Scalar = typename Products::Scalar;
  const Plan plan(call);
  const Output<Scalar> output(call);
  const int64_t rows = call.B * call.J * plan.rows, kept = plan.parts > 1 ? rows * plan.parts : 0;
  std::vector<Sums> sums(kept);
  const auto values = scratch<float>(kept * call.V);
  parallel_work_queue(plan.items, [&](auto next_item) {
    AttentionTile<Products> tile(call);
    const auto span_of = [&](int64_t item) { return item < plan.items ? plan.span(call, item) : Span(); };
    int64_t item = next_item();
    Span span = span_of(item);
    tile.prefetch(span);
    for (int64_t next; item < plan.items; item = next, span = span_of(next)) {
      next = next_item();
      tile(span, span_of(next));
      for (int64_t r = 0; r < span.rows; ++r) {
        const Sums row = tile.sums(r);
        const int64_t in_head = span.first_row + r, head = span.sequence * call.J + span.head;
        if (kept == 0) {
          output.write(span.sequence, span.head, in_head, &row, 1);
        } else {
          const int64_t at = (head * plan.rows + in_head) * plan.parts + item % plan.parts;
          sums[at] = {row.greatest, row.total, std::copy_n(row.values, call.V, &values[at * call.V]) - call.V};
        }
      }
    }
  });
  if (kept == 0) return;
  for_each_row(rows, plan.parts * call.V, 0, [&](int64_t row, float*) {
    const int64_t head = row / plan.rows;
    output.write(head / call.J, head % call.J, row % plan.rows, &sums[row * plan.parts], plan.parts);
  });
}

}  // namespace moe_metal
