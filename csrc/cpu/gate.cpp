// The logits are float from the products on, whatever the dtypes, and come in one of three ways, all of which add in an
// order that neither the threads nor the other tokens change:
//   dots     few tokens, any dtype: experts shared out among threads
//   tiles    bfloat16, on processors with AMX
//   blocks   float, on AVX-512: oneDNN's brgemm
#include <torch/library.h>

#include <memory>

#include "contract.h"
#include "dots.h"
#include "norm.h"
#include "routing.h"
#include "tiles.h"
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/CPUBlas.h>
#endif

namespace moe_metal {
namespace {

const float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<float>() : nullptr; }

// From logits to the outputs of token t. One per thread.
class Rows {
 public:
  explicit Rows(const Gate& call)
      : call_(call), route_(call.params, floats(call.select_bias), floats(call.per_expert_scale)) {}

  void operator()(int64_t t, float* logits) {
    const int64_t E = call_.params.experts, K = call_.params.top_k;
    if (const float* bias = floats(call_.router_bias)) {
      for (int64_t e = 0; e < E; ++e) logits[e] += bias[e];
    }
    route_(logits, call_.weights.mutable_data_ptr<float>() + t * K, call_.experts.mutable_data_ptr<int32_t>() + t * K);
  }

 private:
  const Gate& call_;
  Router route_;
};

// to[i] = token first + i as float, and normed
void wide_rows(const Gate& call, int64_t first, int64_t count, float* to) {
  const int64_t H = call.H;
  const float* norm_weight = floats(call.norm_weight);
  with_dtype(call.hidden.scalar_type(), [&](auto scalar) {
    const auto* hidden = call.hidden.data_ptr<decltype(scalar)>() + first * H;
    for_each_row(count, 2 * H, 0, [=, &call](int64_t i, float*) {
      const auto* from = hidden + i * H;
      const Vec scale(norm_weight ? rms(from, H, call.eps) : 1.0f);
      for_each_vector(H, [=](int64_t h, auto n) {
        const Vec x = load(from + h, n);
        store(to + i * H + h, norm_weight ? x * scale * load(norm_weight + h, n) : x, n);
      });
    });
  });
}

template <class Scalar>
std::unique_ptr<Scalar[]> scratch(int64_t count) {
  return std::make_unique_for_overwrite<Scalar[]>(count);
}

void by_dots(const Gate& call) {
  constexpr int64_t kBlock = 64, kExperts = 16;
  const int64_t H = call.H, E = call.params.experts;
  const auto x = scratch<float>(std::min(call.T, kBlock) * H), logits = scratch<float>(std::min(call.T, kBlock) * E);
  for (int64_t first = 0; first < call.T; first += kBlock) {
    const int64_t count = std::min(kBlock, call.T - first);
    wide_rows(call, first, count, x.get());
    with_dtype(call.router_weight.scalar_type(), [&](auto scalar) {
      const auto* router_weight = call.router_weight.data_ptr<decltype(scalar)>();
      for_each_row(at::divup(E, kExperts), kExperts * count * H, 0, [&](int64_t block, float*) {
        const int64_t e = block * kExperts;
        const float* from[kBlock];
        float* to[kBlock];
        for (int64_t t = 0; t < count; ++t) from[t] = &x[t * H], to[t] = &logits[t * E + e];
        product_by_rows(Matrix<decltype(scalar)>{router_weight + e * H, H, 1, std::min(kExperts, E - e), H},
                        {from, to, count});
      });
    });
    constexpr int64_t kGrain = 16;  // rows to route that are worth a thread
    at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
      Rows route(call);
      for (int64_t t = begin; t < end; ++t) route(first + t, &logits[t * E]);
    });
  }
}

#ifdef MOE_METAL_AMX
using at::BFloat16;

// Up to four groups of 16 tokens through the product and the router. One per thread. A normed row is float; it goes in
// as the sum of three rows of 8 bits each, which is exact, and each of the three takes the place of a group.
class Tiles {
 public:
  Tiles(const Gate& call, const Strips& strips)
      : call_(call),
        strips_(strips),
        parts_(parts(call)),
        size_(strips.blocks() * kTileSize),
        tokens_(scratch<BFloat16>(kGroups * size_)),
        split_(scratch<BFloat16>(parts_ == 1 ? 0 : parts_ * kTile * call.H)),
        products_(strips.tiles.size()),
        logits_(scratch<float>(kGroups * kTile * call.params.experts)),
        route_(call) {}

  // How many tokens go through at once.
  static int64_t most(const Gate& call) { return kGroups / parts(call) * kTile; }

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H;
    const auto* x = call_.hidden.data_ptr<BFloat16>() + first * H;
    if (parts_ > 1) split_normed(x, count);
    const int64_t groups = parts_ == 1 ? at::divup(count, kTile) : parts_;
    for (int64_t g = 0; g < groups; ++g) {
      const auto* from = parts_ == 1 ? x + g * kTile * H : &split_[g * kTile * H];
      pack_right([&](int64_t i) { return from + i * H; }, parts_ == 1 ? count - g * kTile : count, H,
                 &tokens_[g * size_]);
    }
    multiply(groups);
    for (int64_t t = 0; t < count; t += kTile) collect(t);
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  struct alignas(64) Product {
    float of_group[kGroups][kTile][kTile];
  };
  static int64_t parts(const Gate& call) { return call.norm_weight.defined() ? 3 : 1; }

  void split_normed(const BFloat16* x, int64_t count) {
    const int64_t H = call_.H;
    const float* norm_weight = floats(call_.norm_weight);
    const Vec upper_half(std::bit_cast<float>(0xffff0000));
    for (int64_t t = 0; t < count; ++t) {
      const Vec scale(rms(x + t * H, H, call_.eps));
      for_each_vector(H, [&](int64_t h, auto n) {
        Vec rest = load(x + t * H + h, n) * scale * load(norm_weight + h, n);
        for (int part = 0; part < 3; ++part) {
          const Vec top = rest & upper_half;
          store(&split_[(part * kTile + t) * H + h], top, n);
          rest = rest - top;
        }
      });
    }
  }

  // Some columns at a time, for which the tokens stay in the first cache while all experts pass.
  void multiply(int64_t groups) {
    constexpr int64_t kBlocks = 8;
    for (int64_t b = 0; b < strips_.blocks(); b += kBlocks) {
      for (size_t s = 0; s < strips_.tiles.size(); ++s) {
        WeightTiles weights = strips_.tiles[s];
        weights.data += b * weights.block;
        kMultiply[groups - 1](weights, &tokens_[b * kTileSize], size_, std::min(kBlocks, strips_.blocks() - b),
                              products_[s].of_group, b > 0);
      }
    }
  }

  // The logits of the group that begins with token t.
  void collect(int64_t t) {
    const int64_t E = call_.params.experts;
    for (int64_t e = 0; e < E; e += kTile) {
      const auto& products = products_[e / kTile].of_group;
      __m512i tile[kTile];
      for (int64_t r = 0; r < kTile; ++r) {
        Vec logit = Vec::loadu(products[t / kTile][r]);
        for (int64_t part = 1; part < parts_; ++part) logit = logit + Vec::loadu(products[part][r]);
        tile[r] = _mm512_castps_si512(logit);
      }
      transpose(tile);
      for (int64_t n = 0; n < kTile; ++n) {
        store(&logits_[(t + n) * E + e], Vec(_mm512_castsi512_ps(tile[n])), std::min(kTile, E - e));
      }
    }
  }

  const Gate& call_;
  const Strips& strips_;
  const int64_t parts_, size_;
  std::unique_ptr<BFloat16[]> tokens_, split_;
  std::vector<Product> products_;
  std::unique_ptr<float[]> logits_;
  Rows route_;
};

// T = 8, E = 128, H = 2048 on 2 cores with AMX takes 16 us by tiles and 38 by dots.
bool worth_tiles(const Gate& call) {
  return call.T > 4 && call.hidden.scalar_type() == at::kBFloat16 &&
         call.router_weight.scalar_type() == at::kBFloat16 && tiles_available();
}

void by_tiles(const Gate& call) {
  const int64_t E = call.params.experts, H = call.H;
  Strips strips(at::divup(E, kTile), H);
  for (int64_t e = 0; e < E; e += kTile) {
    strips.read(e / kTile, {call.router_weight.data_ptr<BFloat16>() + e * H, H, 1, std::min(kTile, E - e), H});
  }
  const int64_t groups = at::divup(call.T, kTile), threads = at::get_num_threads();
  const int64_t block = std::min(Tiles::most(call), at::divup(groups, threads) * kTile);
  const int64_t blocks = at::divup(call.T, block);
  share(blocks, [&](auto take) {
    const TileShapes shapes;
    Tiles run(call, strips);
    for (int64_t i = take(); i < blocks; i = take()) run(i * block, std::min(block, call.T - i * block));
  });
}
#else
bool worth_tiles(const Gate&) { return false; }
void by_tiles(const Gate&) {}
#endif

#if defined(CPU_CAPABILITY_AVX512) && defined(CPUBLAS_BRGEMM_F32F32F32)
// [E, H] -> [H, E]
std::unique_ptr<float[]> transposed(const Tensor& router_weight) {
  constexpr int64_t kColumns = 64;
  const int64_t E = router_weight.size(0), H = router_weight.size(1);
  auto to = scratch<float>(E * H);
  const float* from = router_weight.data_ptr<float>();
  for_each_row(at::divup(H, kColumns), E * kColumns, 0, [&](int64_t block, float*) {
    const int64_t column = block * kColumns, count = std::min(kColumns, H - column);
    at::vec::transpose_mxn<float>(from + column, H, &to[column * E], E, E, count);
  });
  return to;
}

// A block of tokens through the product and the router. One per thread.
class Blocks {
 public:
  static constexpr int64_t kTokens = 64;

  Blocks(const Gate& call, const float* right)
      : call_(call),
        right_(right),
        as_they_are_(call.hidden.scalar_type() == at::kFloat && !call.norm_weight.defined()),
        left_(scratch<float>(as_they_are_ ? 0 : kTokens * call.H)),
        route_(call),
        logits_(scratch<float>(kTokens * call.params.experts)) {}
  ~Blocks() { at::native::cpublas::brgemm_release(false); }
  Blocks(const Blocks&) = delete;

  void operator()(int64_t block) {
    const int64_t first = block * kTokens, count = std::min(kTokens, call_.T - first);
    if (as_they_are_) {
      multiply(call_.hidden.data_ptr<float>() + first * call_.H, count);
    } else {
      wide_rows(call_, first, count, left_.get());
      multiply(left_.get(), count);
    }
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  // Some columns at a time, for which the weights stay in the first caches: T = 4096, E = 128, H = 2048 takes 11 ms so,
  // 20 with all columns at once, and 15 with 128.
  void multiply(const float* rows, int64_t count) {
    constexpr int64_t kColumns = 256;
    const int64_t H = call_.H, E = call_.params.experts;
    for (int64_t h = 0; h < H; h += kColumns) {
      at::native::cpublas::brgemm(count, E, std::min(kColumns, H - h), H, E, E, h > 0, rows + h, right_ + h * E,
                                  logits_.get(), false);
    }
  }

  const Gate& call_;
  const float* right_;
  const bool as_they_are_;
  std::unique_ptr<float[]> left_;
  Rows route_;
  std::unique_ptr<float[]> logits_;
};

// Transposing the router's weights costs as much as some tokens' dot products (measured with E = 128, H = 2048).
bool worth_blocks(const Gate& call) { return call.T > 32; }

void by_blocks(const Gate& call) {
  const auto right = transposed(call.router_weight.to(at::kFloat));
  at::parallel_for(0, at::divup(call.T, Blocks::kTokens), 1, [&](int64_t begin, int64_t end) {
    Blocks run(call, right.get());
    for (int64_t block = begin; block < end; ++block) run(block);
  });
}
#else
bool worth_blocks(const Gate&) { return false; }
void by_blocks(const Gate&) {}
#endif

std::tuple<Tensor, Tensor> gate(const Tensor& hidden, const Tensor& router_weight, const OptionalTensor& norm_weight,
                                const OptionalTensor& router_bias, const OptionalTensor& select_bias,
                                const OptionalTensor& per_expert_scale, int64_t top_k, std::string_view scoring,
                                std::string_view renormalize, int64_t n_group, int64_t topk_group,
                                std::string_view group_score, double scaling_factor, double softcap, double eps) {
  Gate call =
      gate_arguments(hidden, router_weight, norm_weight, router_bias, select_bias, per_expert_scale,
                     {top_k, scoring, renormalize, n_group, topk_group, group_score, scaling_factor, softcap}, eps);
  if (call.T == 0) return {call.weights, call.experts};
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  if (worth_tiles(call)) {
    by_tiles(call);
  } else {
    worth_blocks(call) ? by_blocks(call) : by_dots(call);
  }
  return {call.weights, call.experts};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("gate", &moe_metal::gate); }
