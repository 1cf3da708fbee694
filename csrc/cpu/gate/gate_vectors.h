// `gate` for many bfloat16 tokens on processors with AVX512-BF16: the products of x86/tiles.h, with tokens as the left
// operand, which is read in place. The right operand has the experts, which are packed once.
#pragma once
#include "cpu/gate/gate.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

// Multiplies and routes some tokens. Each thread has its own.
class GateVectors {
 public:
  static constexpr int64_t kTokens = 32;  // the most at a time

  GateVectors(const Gate& call, const TokenGroups& experts)
      : call_(call),
        experts_(experts),
        tokens_(kTokens / kTile, call.H),
        products_(tokens_.tiles.size() * experts.count()),
        logits_(scratch<float>(experts.count() * kTile)),
        route_(call) {}

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H, strips = at::divup(count, kTile);
    const auto* x = elements<at::BFloat16>(call_.hidden) + first * H;
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t t = s * kTile;
      tokens_.read(s, {x + t * H, H, 1, std::min(kTile, count - t), H});
    }
    multiply(strips);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t g = 0; g < experts_.count(); ++g) {
        store(&logits_[g * kTile], Vec::loadu(products_of(t / kTile)[g].of_group[t % kTile]), Whole());
      }
      route_(first + t, logits_.get());
    }
  }

 private:
  struct alignas(64) Product {
    float of_group[kTile][kTile];
  };
  Product* products_of(int64_t strip) { return &products_[strip * experts_.count()]; }

  // Multiplies some columns at a time for all tokens, so that those of the experts stay in the L2 cache.
  void multiply(int64_t strips) {
    constexpr int64_t kBlocks = 64;
    for (int64_t b = 0; b < tokens_.blocks(); b += kBlocks) {
      const TokenGroups experts = {experts_.data + b * kTileSize, experts_.size, experts_.tokens};
      for (int64_t s = 0; s < strips; ++s) {
        WeightTiles tokens = tokens_.tiles[s];
        tokens.data += b * tokens.block;
        multiply_strip(tokens, experts, std::min(kBlocks, tokens_.blocks() - b), &products_of(s)->of_group, b > 0);
      }
    }
  }

  const Gate& call_;
  const TokenGroups experts_;
  Strips tokens_;
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
  const int64_t strips = at::divup(T, kTile), of_thread = at::divup(strips, at::get_num_threads());
  const int64_t block = std::min(GateVectors::kTokens, of_thread * kTile), blocks = at::divup(T, block);
  parallel_work_queue(blocks, [&](auto next_item) {
    GateVectors run(call, {packed.get(), size, E});
    for (int64_t i = next_item(); i < blocks; i = next_item()) run(i * block, std::min(block, T - i * block));
  });
}

}  // namespace moe_metal
