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
  constexpr int64_t kTokens = 128, kExperts = 16;  // at once
  const int64_t H = call.H, E = call.params.experts, most = std::min(call.T, kTokens);
  const bool many = call.T > kWorthTransposing;  // never with AVX-512: see gate_way()
  const int64_t at_once = many ? std::max(kExperts, Panel::kPanelRows) : kExperts;
  const int64_t blocks = at::divup(E, at_once), width = blocks * at_once;  // panels are whole
  const auto x = scratch<float>(most * H), logits = scratch<float>(most * width);
  for (int64_t first = 0; first < call.T; first += kTokens) {
    const int64_t count = std::min(kTokens, call.T - first);
    float_rows(call, first, count, x.get());
    with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
      const auto* router_weight = elements<decltype(scalar)>(call.router_weight);
      for_each_row(blocks, at_once * count * H, 0, [&](int64_t block, float*) {
        const int64_t e = block * at_once;
        const float* from[kTokens];
        float* to[kTokens];
        for (int64_t t = 0; t < count; ++t) from[t] = &x[t * H], to[t] = &logits[t * width + e];
        std::optional<Panel> panel;
        if (many) panel.emplace();
        product(Matrix<decltype(scalar)>{router_weight + e * H, H, 1, std::min(at_once, E - e), H}, {from, to, count},
                panel);
      });
    });
    route_tokens(call, first, count, logits.get(), width);
  }
}

}  // namespace moe_metal
