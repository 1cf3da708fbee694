// `gate` for many bfloat16 tokens on processors with AVX512-BF16: the products of x86/tiles.h, with tokens as the left
// operand, which is read in place, and experts as the right operand, which are packed.
#pragma once
#include "cpu/gate/gate.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

// Multiplies and routes up to 16 tokens. Each thread has its own, and packs all experts for itself: what another thread
// has just packed is in the cache of another core, and reading it there takes longer. With 512 tokens on two threads, a
// shared copy takes 1.03 to 1.15 times as long, with 4,096 tokens 0.98 to 1.02 (two cores of a virtual Zen 4).
class GateVectors {
 public:
  explicit GateVectors(const Gate& call)
      : call_(call),
        size_(at::divup(call.H, kDepth) * kTileSize),
        products_(at::divup(call.params.experts, kTile)),
        experts_(scratch<at::BFloat16>(groups() * size_)),
        tokens_(1, call.H),
        logits_(scratch<float>(groups() * kTile)),
        route_(call) {
    const int64_t E = call.params.experts, H = call.H;
    const auto* weights = elements<at::BFloat16>(call.router_weight);
    for (int64_t g = 0; g < groups(); ++g) {
      pack_right([&](int64_t i) { return weights + (g * kTile + i) * H; }, E - g * kTile, H, &experts_[g * size_]);
    }
  }

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H;
    tokens_.read(0, {elements<at::BFloat16>(call_.hidden) + first * H, H, 1, count, H});
    multiply();
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t g = 0; g < groups(); ++g) store(&logits_[g * kTile], Vec::loadu(products_[g].of_group[t]), Whole());
      route_(first + t, logits_.get());
    }
  }

 private:
  struct alignas(64) Product {
    float of_group[kTile][kTile];
  };
  int64_t groups() const { return products_.size(); }

  // Multiplies some columns at a time, so that those of the tokens stay in the L1 cache.
  void multiply() {
    constexpr int64_t kBlocks = 64;
    for (int64_t b = 0; b < tokens_.blocks(); b += kBlocks) {
      const TokenGroups experts = {&experts_[b * kTileSize], size_, call_.params.experts};
      WeightTiles tokens = tokens_.tiles[0];
      tokens.data += b * tokens.block;
      multiply_strip(tokens, experts, std::min(kBlocks, tokens_.blocks() - b), &products_[0].of_group, b > 0);
    }
  }

  const Gate& call_;
  const int64_t size_;
  std::vector<Product> products_;
  std::unique_ptr<at::BFloat16[], Free> experts_;
  Strips tokens_;
  std::unique_ptr<float[], Free> logits_;
  RouteToken route_;
};

inline void gate_by_vectors(const Gate& call) {
  const int64_t blocks = at::divup(call.T, kTile);
  parallel_work_queue(blocks, [&](auto next_item) {
    GateVectors run(call);
    for (int64_t i = next_item(); i < blocks; i = next_item()) run(i * kTile, std::min(kTile, call.T - i * kTile));
  });
}

}  // namespace moe_metal
