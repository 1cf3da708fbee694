// Logits are float, whatever the dtypes. The order of additions depends neither on the threads nor on the other tokens.
#include "cpu/gate.h"

#include "cpu/plan.h"
#include "cpu/processor_ways.h"
#include "cpu/vector/dots.h"
#include "cpu/vector/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// Routes tokens [first, first + count) on all threads. `width`: from one token's logits to the next.
void route_tokens(const Gate& call, int64_t first, int64_t count, float* logits, int64_t width) {
  constexpr int64_t kWorthAThread = 16;
  at::parallel_for(0, count, kWorthAThread, [&](int64_t begin, int64_t end) {
    RouteToken route(call);
    for (int64_t t = begin; t < end; ++t) route(first + t, logits + t * width);
  });
}

// to[t] = the row of token first + t as float, normed if there are norm weights
void float_rows(const Gate& call, int64_t first, int64_t count, float* to) {
  const int64_t H = call.H;
  const float* norm_weight = floats(call.norm_weight);
  with_dtype(call.hidden.scalar_type(), [&](auto scalar) {
    const auto* hidden = elements<decltype(scalar)>(call.hidden) + first * H;
    for_each_row(count, 2 * H, 0, [&](int64_t t, float*) {
      const auto* row = hidden + t * H;
      const Vec scale(norm_weight ? inv_rms(row, H, call.eps) : 1);
      for_each_vector(H, [&](int64_t h, auto n) {
        const Vec x = load(row + h, n);
        store(to + t * H + h, norm_weight ? x * scale * load(norm_weight + h, n) : x, n);
      });
    });
  });
}

void by_dots(const Gate& call) {
  constexpr int64_t kExperts = 16, kWorthAThread = 64;
  const int64_t H = call.H, E = call.params.experts, T = call.T, threads = at::get_num_threads();
  const bool many = T > kWorthTransposing;
  const bool as_they_are = call.hidden.scalar_type() == at::kFloat && !call.norm_weight.defined();
  // Threads divide the tokens among them or, if there are too few, the experts.
  const bool divide_tokens = T >= kWorthAThread * threads;
  const int64_t of_thread = divide_tokens ? at::divup(T, threads) : T;
  const int64_t tokens = even_part(of_thread, kTokens), items = at::divup(T, tokens);
  const int64_t least = many ? std::max(kExperts, Panel::kPanelRows) : kExperts;  // panels are whole
  const int64_t width = at::divup(E, least) * least;
  const int64_t experts = divide_tokens && many ? width : least, of_experts = at::divup(E, experts);
  const auto run = [&](int64_t begin, int64_t end) {
    const auto x = scratch<float>(as_they_are ? 0 : tokens * H), logits = scratch<float>(tokens * width);
    for (int64_t first = begin * tokens; first < std::min(end * tokens, T); first += tokens) {
      const int64_t count = std::min(tokens, T - first);
      if (!as_they_are) float_rows(call, first, count, x.get());
      const float* rows = as_they_are ? elements<float>(call.hidden) + first * H : x.get();
      with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
        const auto* router_weight = elements<decltype(scalar)>(call.router_weight);
        for_each_row(of_experts, experts * count * H, 0, [&](int64_t item, float*) {
          const int64_t e = item * experts;
          const float* from[kTokens];
          float* to[kTokens];
          for (int64_t t = 0; t < count; ++t) from[t] = rows + t * H, to[t] = &logits[t * width + e];
          std::optional<Panel> panel;
          if (many) panel.emplace();
          product(Matrix<decltype(scalar)>{router_weight + e * H, H, 1, std::min(experts, E - e), H}, {from, to, count},
                  panel);
        });
      });
      route_tokens(call, first, count, logits.get(), width);
    }
  };
  if (divide_tokens)
    at::parallel_for(0, items, 1, run);  // a thread of these starts no others
  else
    run(0, items);
}

}  // namespace

void cpu::run_gate(const Gate& given) {
  Gate call = given;
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  if (const auto way = processor_ways().gate; way && way(call)) return;
  by_dots(call);
}

}  // namespace moe_metal
