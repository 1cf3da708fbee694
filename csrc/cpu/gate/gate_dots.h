// `gate` for any dtype and processor: the products of vector/dots.h.
#pragma once
#include "cpu/gate/gate.h"
#include "cpu/plan.h"
#include "cpu/vector/dots.h"

namespace moe_metal {

// to[t] = the row of token first + t as float, normed if there are norm weights
inline void float_rows(const Gate& call, int64_t first, int64_t count, float* to) {
  const int64_t H = call.H;
  with_dtype(call.hidden.scalar_type(), [&](auto scalar) {
    const auto* hidden = elements<decltype(scalar)>(call.hidden) + first * H;
    for_each_row(count, 2 * H, 0, [&](int64_t t, float*) {
      const auto* row = hidden + t * H;
      float_row(row, norm_scale(call, row), floats(call.norm_weight), H, to + t * H);
    });
  });
}

inline void gate_by_dots(const Gate& call) {
  constexpr int64_t kTokens = 256, kExperts = 16, kWorthAThread = 64;  // kTokens: the most at once
  const int64_t H = call.H, E = call.params.experts, T = call.T, threads = at::get_num_threads();
  const bool many = T > kWorthTransposing;  // never with AVX-512: see gate_way()
  const bool as_they_are = call.hidden.scalar_type() == at::kFloat && !call.norm_weight.defined();
  // Threads share out the tokens or, if there are too few, the experts.
  const bool share_tokens = T >= kWorthAThread * threads;
  const int64_t of_thread = share_tokens ? at::divup(T, threads) : T;
  const int64_t tokens = even_part(of_thread, kTokens), turns = at::divup(T, tokens);
  const int64_t least = many ? std::max(kExperts, Panel::kPanelRows) : kExperts;  // panels are whole
  const int64_t width = at::divup(E, least) * least;
  const int64_t experts = share_tokens && many ? width : least, blocks = at::divup(E, experts);
  const auto run = [&](int64_t begin, int64_t end) {
    const auto x = scratch<float>(as_they_are ? 0 : tokens * H), logits = scratch<float>(tokens * width);
    for (int64_t first = begin * tokens; first < std::min(end * tokens, T); first += tokens) {
      const int64_t count = std::min(tokens, T - first);
      if (!as_they_are) float_rows(call, first, count, x.get());
      const float* rows = as_they_are ? elements<float>(call.hidden) + first * H : x.get();
      with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
        const auto* router_weight = elements<decltype(scalar)>(call.router_weight);
        for_each_row(blocks, experts * count * H, 0, [&](int64_t block, float*) {
          const int64_t e = block * experts;
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
  if (share_tokens)
    at::parallel_for(0, turns, 1, run);  // a thread of these starts no others
  else
    run(0, turns);
}

}  // namespace moe_metal
