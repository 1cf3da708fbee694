// `gate` for many bfloat16 tokens on processors with AVX512-BF16: the products of x86/tiles.h, with the tokens as left
// operand, which is read in place, and the experts as right operand, which is packed once.
#pragma once
#include "cpu/gate/gate.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

// Multiplies and routes up to 16 tokens. Each thread has its own.
class GateVectors {
 public:
  GateVectors(const Gate& call, const TokenGroups& experts)
      : call_(call),
        experts_(experts),
        strip_(1, call.H),
        products_(experts.count()),
        logits_(scratch<float>(experts.count() * kTile)),
        route_(call) {}

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H;
    strip_.read(0, {elements<at::BFloat16>(call_.hidden) + first * H, H, 1, count, H});
    multiply();
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t g = 0; g < experts_.count(); ++g) {
        store(&logits_[g * kTile], Vec::loadu(products_[g].of_group[t]), Whole());
      }
      route_(first + t, logits_.get());
    }
  }

 private:
  struct alignas(64) Product {
    float of_group[kTile][kTile];
  };

  // Multiplies a few columns at a time by all experts, so that the tokens stay in the L1 cache.
  void multiply() {
    constexpr int64_t kBlocks = 16;
    for (int64_t b = 0; b < strip_.blocks(); b += kBlocks) {
      WeightTiles tokens = strip_.tiles[0];
      tokens.data += b * tokens.block;
      multiply_strip(tokens, {experts_.data + b * kTileSize, experts_.size, experts_.tokens},
                     std::min(kBlocks, strip_.blocks() - b), &products_[0].of_group, b > 0);
    }
  }

  const Gate& call_;
  const TokenGroups experts_;
  Strips strip_;
  std::vector<Product> products_;
  std::unique_ptr<float[], Free> logits_;
  RouteToken route_;
};

inline void gate_by_vectors(const Gate& call) {
  const int64_t T = call.T, H = call.H, E = call.params.experts;
  const int64_t groups = at::divup(E, kTile), size = at::divup(H, kDepth) * kTileSize;
  const auto packed = scratch<at::BFloat16>(groups * size);
  const auto* weights = elements<at::BFloat16>(call.router_weight);
  parallel_work_queue(groups, [&](auto next_item) {
    for (int64_t g = next_item(); g < groups; g = next_item()) {
      pack_right([&](int64_t i) { return weights + (g * kTile + i) * H; }, E - g * kTile, H, &packed[g * size]);
    }
  });
  const int64_t strips = at::divup(T, kTile);
  parallel_work_queue(strips, [&](auto next_item) {
    GateVectors run(call, {packed.get(), size, E});
    for (int64_t i = next_item(); i < strips; i = next_item()) run(i * kTile, std::min(kTile, T - i * kTile));
  });
}

}  // namespace moe_metal
