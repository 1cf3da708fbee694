#include "attention.h"

#include "rows.h"

namespace moe_metal {
namespace {

// How the work is shared out: tiles of rows for each sequence and key head, whose keys are cut into parts where there
// would be too few tiles for many cores. It depends on the sizes alone, so that the bits do not depend on the threads.
struct Plan {
  int64_t group, rows, tiles, parts;

  explicit Plan(const Attention& call) : group(call.A / call.J), rows(group * call.T), tiles(at::divup(rows, kRows)) {
    constexpr int64_t kEnough = 64, kWorthAPart = 256;
    const int64_t seen = call.window > 0 ? std::min(call.S, call.window + call.T) : call.S;
    const int64_t most = std::max<int64_t>(at::divup(seen, kWorthAPart), 1);
    parts = std::clamp<int64_t>(at::divup(kEnough, call.B * call.J * tiles), 1, most);
  }

  int64_t count(const Attention& call) const { return call.B * call.J * tiles * parts; }

  Span span(const Attention& call, int64_t item) const {
    const int64_t part = item % parts, tile = item / parts % tiles, head = item / parts / tiles;
    const int64_t first_row = tile * kRows, last_row = std::min(first_row + kRows, rows);
    const int64_t first = call.first_key(first_row / group), last = call.last_key((last_row - 1) / group);
    const int64_t keys = at::divup(at::divup(std::max<int64_t>(last - first, 0), parts), kKeys) * kKeys;
    const int64_t first_key = first + part * keys;
    return {head / call.J, head % call.J, first_row, last_row - first_row, first_key, std::min(first_key + keys, last)};
  }
};

// One row of the output out of the sums of its parts, which lie `parts.width` apart, and out of the sink.
template <class Scalar>
void write_row(const Sums& sums, int64_t parts, float sink, int64_t V, Scalar* to) {
  if (std::all_of(sums.total, sums.total + parts, [](float total) { return total == 0; })) {
    std::fill_n(to, V, Scalar(0));  // it sees no key
    return;
  }
  float greatest = sink, all = 0;
  for (int64_t p = 0; p < parts; ++p) greatest = std::max(greatest, sums.greatest[p]);
  const float least_power = greatest == -kInfinity ? 0 : greatest;
  for (int64_t p = 0; p < parts; ++p) {
    sums.greatest[p] = std::exp2(sums.greatest[p] - least_power);  // now the factor of its part
    all += sums.greatest[p] * sums.total[p];
  }
  const Vec inverse(1 / (all + std::exp2(sink - least_power)));
  for_each_vector(V, [&](int64_t v, auto count) {
    Vec total(0);
    for (int64_t p = 0; p < parts; ++p) {
      total = at::vec::fmadd(load(sums.out + p * sums.width + v, count), Vec(sums.greatest[p]), total);
    }
    store(to + v, total * inverse, count);
  });
}

// Where a row of a group goes, and its sink.
template <class Scalar>
struct Rows {
  const Attention& call;
  const float* sinks;
  Scalar* output;

  void write(int64_t sequence, int64_t head, int64_t row, const Sums& sums, int64_t parts) const {
    const int64_t group = call.A / call.J, a = head * group + row % group, t = row / group;
    const float sink = sinks ? sinks[a] * kLog2E : -kInfinity;
    write_row(sums, parts, sink, call.V, output + ((sequence * call.T + t) * call.A + a) * call.V);
  }
};

template <class Scalar, bool pairs>
void by_tiles(const Attention& call) {
  const Plan plan(call);
  const auto sinks = call.sinks.defined() ? call.sinks.to(at::kFloat) : Tensor();
  const Rows<Scalar> rows{call, sinks.defined() ? elements<float>(sinks) : nullptr,
                          call.output.mutable_data_ptr<Scalar>()};
  const int64_t all = call.B * call.J * plan.rows, kept = plan.parts > 1 ? all * plan.parts : 0;
  const auto greatest = scratch<float>(kept), total = scratch<float>(kept), out = scratch<float>(kept * call.V);
  const int64_t items = plan.count(call);
  share(items, [&](auto take) {
    AttentionTile<Scalar, pairs> tile(call);
    for (int64_t item = take(); item < items; item = take()) {
      const Span span = plan.span(call, item);
      const Sums sums = tile(span);
      for (int64_t r = 0; r < span.rows; ++r) {
        const int64_t row = span.first_row + r;
        if (kept == 0) {
          rows.write(span.sequence, span.head, row, {sums.greatest + r, sums.total + r, sums.out + r * sums.width, 0},
                     1);
          continue;
        }
        const int64_t at = ((span.sequence * call.J + span.head) * plan.rows + row) * plan.parts + item % plan.parts;
        greatest[at] = sums.greatest[r];
        total[at] = sums.total[r];
        std::copy_n(sums.out + r * sums.width, call.V, out.get() + at * call.V);
      }
    }
  });
  if (kept == 0) return;
  for_each_row(all, plan.parts * call.V, 0, [&](int64_t row, float*) {
    const int64_t at = row * plan.parts, head = row / plan.rows;
    const Sums sums{greatest.get() + at, total.get() + at, out.get() + at * call.V, call.V};
    rows.write(head / call.J, head % call.J, row % plan.rows, sums, plan.parts);
  });
}

}  // namespace

void run_attention(const Attention& call) {
  with_dtype(call.q.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<Scalar, at::BFloat16>) {
      if (bfloat16_available()) return by_tiles<Scalar, true>(call);
    }
#endif
    by_tiles<Scalar, false>(call);
  });
}

}  // namespace moe_metal
