// `gate` for many tokens on AVX-512: oneDNN's brgemm, in float, or in bfloat16 on processors with AMX.
#pragma once
#include <ATen/native/CPUBlas.h>
#include "cpu/gate/gate.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

// Computes logits of some experts for some tokens. Each thread has its own. It multiplies kColumns columns at a time,
// so that the transposed weights of the experts stay in the core's own caches for all tokens: T = 4096, E = 128, H =
// 2048 takes 10 ms in float with 256 columns and 20 with all; in bfloat16 with AMX 1.45 with all and 1.7 with 512.
template <class Operand>
class GateBlocks {
 public:
  GateBlocks(const Gate& call, int64_t tokens, int64_t experts)
      : call_(call),
        as_they_are_(call.hidden.scalar_type() == c10::CppTypeToScalarType<Operand>() && !call.norm_weight.defined()),
        width_(at::divup(experts, kLanes) * kLanes),
        right_(scratch<Operand>(at::divup(std::min(call.H, kColumns), kDepth) * kDepth * width_)),
        left_(scratch<Operand>(as_they_are_ ? 0 : kTokens * kColumns)),
        scales_(scratch<float>(tokens)) {}
  ~GateBlocks() { at::native::cpublas::brgemm_release(kPairs); }
  GateBlocks(const GateBlocks&) = delete;

  // logits[t * E + e] for e from `expert` on, of token first + t.
  void operator()(int64_t first, int64_t tokens, int64_t expert, int64_t experts, float* logits) {
    const int64_t H = call_.H, E = call_.params.experts;
    with_dtype(call_.hidden.scalar_type(), [&](auto scalar) {
      const auto* hidden = elements<decltype(scalar)>(call_.hidden) + first * H;
      for (int64_t t = 0; t < tokens; ++t) scales_[t] = norm_scale(call_, hidden + t * H);
    });
    for (int64_t h = 0; h < H; h += kColumns) {
      const int64_t columns = std::min(kColumns, H - h);
      for (int64_t e = 0; e < experts; e += kLanes) {
        transpose_weights(expert + e, std::min(kLanes, experts - e), h, columns, &right_[e * (kPairs ? 2 : 1)]);
      }
      for (int64_t t = 0; t < tokens; t += kTokens) {
        const int64_t count = std::min(kTokens, tokens - t);
        at::native::cpublas::brgemm(count, experts, columns, as_they_are_ ? H : kColumns, width_, E, h > 0,
                                    left(first + t, count, h, columns, &scales_[t]), right_.get(), logits + t * E,
                                    kPairs);
      }
    }
  }

 private:
  static constexpr bool kPairs = std::is_same_v<Operand, at::BFloat16>;   // pairs of columns are contiguous
  static constexpr int64_t kColumns = kPairs ? 2048 : 256, kTokens = 64;  // of one product

  // Transposes weights of up to 16 experts.
  void transpose_weights(int64_t expert, int64_t experts, int64_t column, int64_t columns, Operand* to) {
    const int64_t H = call_.H, from = expert * H + column;
    if constexpr (kPairs) {
      const auto* weights = elements<at::BFloat16>(call_.router_weight) + from;
      pack_right([=](int64_t e) { return weights + e * H; }, experts, columns, to, 2 * width_);
    } else {
      with_dtype(call_.router_weight.scalar_type(), [&](auto scalar) {
        const auto* weights = elements<decltype(scalar)>(call_.router_weight) + from;
        for_each_vector(columns, [&](int64_t h, auto count) {
          Vec tile[kLanes];
          for (int64_t e = 0; e < kLanes; ++e) tile[e] = e < experts ? load(weights + e * H + h, count) : Vec(0);
          transpose(tile);
          for (int64_t i = 0; i < count; ++i) store(to + (h + i) * width_, tile[i], Whole());
        });
      });
    }
  }

  // Columns of tokens as left operand: in place, or converted to float and normed.
  const Operand* left(int64_t first, int64_t count, int64_t column, int64_t columns, const float* scales) {
    const int64_t H = call_.H;
    if (as_they_are_) return elements<Operand>(call_.hidden) + first * H + column;
    if constexpr (!kPairs) {
      const float* norm_weight = call_.norm_weight.defined() ? floats(call_.norm_weight) + column : nullptr;
      with_dtype(call_.hidden.scalar_type(), [&](auto scalar) {
        const auto* from = elements<decltype(scalar)>(call_.hidden) + first * H + column;
        for (int64_t t = 0; t < count; ++t) {
          float_row(from + t * H, scales[t], norm_weight, columns, &left_[t * kColumns]);
        }
      });
    }
    return left_.get();
  }

  const Gate& call_;
  const bool as_they_are_;
  const int64_t width_;
  const std::unique_ptr<Operand[], Free> right_, left_;
  const std::unique_ptr<float[], Free> scales_;
};

template <class Operand>
void gate_by_blocks(const Gate& call) {
  constexpr int64_t kTokensPerItem = 512, kMinTokensPerThread = 64;
  const int64_t T = call.T, E = call.params.experts, threads = at::get_num_threads();
  const auto fraction = [=](int64_t count) { return at::divup(at::divup(count, threads), kTile) * kTile; };
  if (T < kMinTokensPerThread * threads) {  // too few tokens, so threads share out the experts
    const auto logits = scratch<float>(T * E);
    const int64_t experts = std::min(E, fraction(E)), items = at::divup(E, experts);
    parallel_work_queue(items, [&](auto next_item) {
      GateBlocks<Operand> multiply(call, T, experts);
      for (int64_t i = next_item(); i < items; i = next_item()) {
        multiply(0, T, i * experts, std::min(experts, E - i * experts), &logits[i * experts]);
      }
    });
    return route_tokens(call, 0, T, logits.get(), E);
  }
  const int64_t tokens = std::min(kTokensPerItem, fraction(T)), items = at::divup(T, tokens);
  parallel_work_queue(items, [&](auto next_item) {
    const auto logits = scratch<float>(tokens * E);
    GateBlocks<Operand> multiply(call, tokens, E);
    RouteToken route(call);
    for (int64_t i = next_item(); i < items; i = next_item()) {
      const int64_t first = i * tokens, count = std::min(tokens, T - first);
      multiply(first, count, 0, E, logits.get());
      for (int64_t t = 0; t < count; ++t) route(first + t, &logits[t * E]);
    }
  });
}

}  // namespace moe_metal
