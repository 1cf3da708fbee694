// x @ weight^T + bias. Threads divide the rows of the weight, and multiply each by all tokens.
#include "cpu/item_rows.h"
#include "cpu/plan.h"
#include "cpu/processor_ways.h"
#include "cpu/weights/weight_rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// The rows of a work item. For few tokens, more rows amortise the preparation of the tokens: 151936 x 2048 in 4 bits at
// T = 1 takes 0.82 to 0.88 of the time with 32 rows. But each thread should get at least eight items: it claims its
// next item before it finishes one, so with fewer some threads idle at the end. With four, 2048 x 2048 takes 1.1 times
// as long. With many tokens, an item of 128 rows uses each part of them again while it is in the cache: 4096 x 2048 in
// float32 at T = 512 takes 0.95 of the time.
int64_t rows_of_item(const Linear& call) {
  const int64_t most = call.T <= 8 ? 8 : call.T > Panel::kManyTokens ? 4 : 1;
  return rows_for_threads(call.N, 8, most);
}

template <class Scalar>
void rows(const Linear& call, const Tensor& x) {
  const int64_t T = call.T, N = call.N, heads = call.heads, at_once = rows_of_item(call);
  const int64_t of_head = at::divup(N, at_once), items = heads * of_head;
  const auto range_of = [&](int64_t item) -> RowRange {
    if (item >= items) return {};
    const int64_t first = item % of_head * at_once;
    return {item / of_head, first, std::min(N - first, at_once)};
  };
  const float* from = elements<float>(x);
  auto* to = call.output.mutable_data_ptr<Scalar>();
  const bool many = heads == 1 && T >= kWorthPreparing && call.x.scalar_type() == at::kBFloat16;
  const auto prepared = many ? prepare_tokens(call.weight, x) : nullptr;
  parallel_work_queue(items, [&](auto next_item) {
    const auto weight = rows_of(call.weight, call.x.scalar_type() == at::kBFloat16);
    std::optional<Panel> panel;
    if (T >= kWorthTransposing) panel.emplace();
    const auto sums = scratch<float>(std::min(T, kTokens) * at_once);
    float bias[kRows];
    const float* rows_of_x[kTokens];
    float* out[kTokens];
    for_each_item(next_item, items, [&](int64_t item, int64_t following) {
      const RowRange rows = range_of(item), next = range_of(following);
      const auto [head, first, count] = rows;
      for (int64_t t = 0; t < T; t += kTokens) {
        const int64_t tokens = std::min(kTokens, T - t);
        for (int64_t i = 0; i < tokens; ++i)
          rows_of_x[i] = from + ((t + i) * heads + head) * call.H, out[i] = &sums[i * at_once];
        weight->product(rows, next, {rows_of_x, out, tokens, prepared.get()}, panel);
        for (int64_t part = 0; part < count; part += kRows) {
          const int64_t size = std::min(kRows, count - part);
          read_bias(call.bias, first + part, 1, size, bias);
          for (int64_t i = 0; i < tokens; ++i) {
            for_each_vector(size, [&](int64_t r, auto n) {
              store(to + ((t + i) * heads + head) * N + first + part + r,
                    load(out[i] + part + r, n) + load(bias + r, n), n);
            });
          }
        }
      }
    });
  });
}

// x as float. Of many heads, the rows may be apart.
Tensor floats_of_x(const Linear& call) {
  if (call.heads == 1 || call.x.is_contiguous()) return as_float(call.x);
  const Tensor floats = empty(call.x.sizes(), call.x.options().dtype(at::kFloat));
  float* to = floats.mutable_data_ptr<float>();
  with_dtype(call.x.scalar_type(), [&](auto scalar) {
    for (int64_t row = 0; row < call.T * call.heads; ++row) {
      const int64_t token = row / call.heads, head = row % call.heads;
      const auto* from = elements<decltype(scalar)>(call.x) + token * call.token_stride() + head * call.head_stride();
      for_each_vector(call.H, [&](int64_t h, auto n) { store(to + row * call.H + h, load(from + h, n), n); });
    }
  });
  return floats;
}

}  // namespace

void cpu::run_linear(const Linear& call) {
  if (const auto way = processor_ways().linear; way && call.heads == 1 && way(call)) return;
  const Tensor x = floats_of_x(call);
  with_dtype(call.x.scalar_type(), [&](auto scalar) { rows<decltype(scalar)>(call, x); });
}

}  // namespace moe_metal
