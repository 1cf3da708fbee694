// The logits are float from the products on, whatever the dtypes, and come in one of three ways, all of which add in an
// order that neither the threads nor the other tokens change:
//   dots     few tokens, any dtype: experts shared out among threads
//   tiles    some tokens in bfloat16, on processors with AMX
//   blocks   many tokens, on AVX-512: oneDNN's brgemm, in float, or with AMX in bfloat16
#include <torch/library.h>

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
    route_(logits, call_.weights.mutable_data_ptr<float>() + t * K, call_.ids.mutable_data_ptr<int32_t>() + t * K);
  }

 private:
  const Gate& call_;
  Router route_;
};

void route_rows(const Gate& call, int64_t first, int64_t count, float* logits) {
  constexpr int64_t kWorthAThread = 16;
  at::parallel_for(0, count, kWorthAThread, [&](int64_t begin, int64_t end) {
    Rows route(call);
    for (int64_t t = begin; t < end; ++t) route(first + t, logits + t * call.params.experts);
  });
}

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
    route_rows(call, first, count, logits.get());
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
  std::unique_ptr<BFloat16[], Free> tokens_, split_;
  std::vector<Product> products_;
  std::unique_ptr<float[], Free> logits_;
  Rows route_;
};

bool tiles_possible(const Gate& call) {
  return call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16 &&
         tiles_available();
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
bool tiles_possible(const Gate&) { return false; }
void by_tiles(const Gate&) {}
#endif

#if defined(MOE_METAL_AMX) && defined(CPUBLAS_BRGEMM_F32F32F32)
// Some experts' logits of some tokens. One per thread. Some columns at a time, for which the experts' weights,
// transposed, stay in the thread's own caches while all the tokens pass: T = 4096, E = 128, H = 2048 takes 10 ms in
// float with 256 columns and 20 with all, and in bfloat16 with AMX 1.45 with all and 1.7 with 512.
template <class Operand>
class Blocks {
 public:
  Blocks(const Gate& call, int64_t tokens, int64_t experts)
      : call_(call),
        as_they_are_(call.hidden.scalar_type() == c10::CppTypeToScalarType<Operand>() && !call.norm_weight.defined()),
        width_(at::divup(experts, kLanes) * kLanes),
        right_(scratch<Operand>(at::divup(std::min(call.H, kColumns), kDepth) * kDepth * width_)),
        left_(scratch<Operand>(as_they_are_ ? 0 : kRows * kColumns)),
        scales_(scratch<float>(call.norm_weight.defined() ? tokens : 0)) {}
  ~Blocks() { at::native::cpublas::brgemm_release(kPairs); }
  Blocks(const Blocks&) = delete;

  // logits[t * E + e] for e from `expert` on, of token first + t.
  void operator()(int64_t first, int64_t tokens, int64_t expert, int64_t experts, float* logits) {
    const int64_t H = call_.H, E = call_.params.experts;
    if (call_.norm_weight.defined()) {
      with_dtype(call_.hidden.scalar_type(), [&](auto scalar) {
        const auto* hidden = call_.hidden.data_ptr<decltype(scalar)>() + first * H;
        for (int64_t t = 0; t < tokens; ++t) scales_[t] = rms(hidden + t * H, H, call_.eps);
      });
    }
    for (int64_t h = 0; h < H; h += kColumns) {
      const int64_t columns = std::min(kColumns, H - h);
      for (int64_t e = 0; e < experts; e += kLanes) {
        transpose_weights(expert + e, std::min(kLanes, experts - e), h, columns, &right_[e * (kPairs ? 2 : 1)]);
      }
      for (int64_t t = 0; t < tokens; t += kRows) {
        const int64_t rows = std::min(kRows, tokens - t);
        if (!as_they_are_) widen(first + t, rows, h, columns, &scales_[t]);
        const Operand* left = as_they_are_ ? call_.hidden.data_ptr<Operand>() + (first + t) * H + h : left_.get();
        at::native::cpublas::brgemm(rows, experts, columns, as_they_are_ ? H : kColumns, width_, E, h > 0, left,
                                    right_.get(), logits + t * E, kPairs);
      }
    }
  }

 private:
  static constexpr bool kPairs = std::is_same_v<Operand, at::BFloat16>;  // of columns, side by side
  static constexpr int64_t kColumns = kPairs ? 2048 : 256, kRows = 64;

  // Up to 16 experts.
  void transpose_weights(int64_t expert, int64_t experts, int64_t column, int64_t columns, Operand* to) {
    const int64_t H = call_.H, from = expert * H + column;
    if constexpr (kPairs) {
      const auto* weights = call_.router_weight.data_ptr<at::BFloat16>() + from;
      pack_right([=](int64_t e) { return weights + e * H; }, experts, columns, to, 2 * width_);
    } else {
      with_dtype(call_.router_weight.scalar_type(), [&](auto scalar) {
        const auto* weights = call_.router_weight.data_ptr<decltype(scalar)>() + from;
        for_each_vector(columns, [&](int64_t h, auto count) {
          Vec tile[kLanes];
          for (int64_t e = 0; e < kLanes; ++e) tile[e] = e < experts ? load(weights + e * H + h, count) : Vec(0);
          transpose(tile);
          for (int64_t i = 0; i < count; ++i) store(to + (h + i) * width_, tile[i], Whole());
        });
      });
    }
  }

  // Columns of tokens as float, and normed.
  void widen(int64_t first, int64_t rows, int64_t column, int64_t columns, const float* scales) {
    const int64_t H = call_.H;
    const float* norm_weight = floats(call_.norm_weight);
    with_dtype(call_.hidden.scalar_type(), [&](auto scalar) {
      const auto* from = call_.hidden.data_ptr<decltype(scalar)>() + first * H + column;
      for (int64_t t = 0; t < rows; ++t) {
        const Vec scale(norm_weight ? scales[t] : 1.0f);
        for_each_vector(columns, [&](int64_t h, auto count) {
          const Vec x = load(from + t * H + h, count);
          store(&left_[t * kColumns + h], norm_weight ? x * scale * load(norm_weight + column + h, count) : x, count);
        });
      }
    });
  }

  const Gate& call_;
  const bool as_they_are_;
  const int64_t width_;
  const std::unique_ptr<Operand[], Free> right_, left_;
  const std::unique_ptr<float[], Free> scales_;
};

constexpr bool kBlocks = true;

template <class Operand>
void by_blocks(const Gate& call) {
  constexpr int64_t kMost = 512, kFewPerThread = 64;
  const int64_t T = call.T, E = call.params.experts, threads = at::get_num_threads();
  const auto fraction = [=](int64_t count) { return at::divup(at::divup(count, threads), kTile) * kTile; };
  if (T < kFewPerThread * threads) {  // too few to share them out, so the experts are
    const auto logits = scratch<float>(T * E);
    const int64_t experts = std::min(E, fraction(E)), items = at::divup(E, experts);
    share(items, [&](auto take) {
      Blocks<Operand> multiply(call, T, experts);
      for (int64_t i = take(); i < items; i = take()) {
        multiply(0, T, i * experts, std::min(experts, E - i * experts), &logits[i * experts]);
      }
    });
    return route_rows(call, 0, T, logits.get());
  }
  const int64_t tokens = std::min(kMost, fraction(T)), items = at::divup(T, tokens);
  share(items, [&](auto take) {
    const auto logits = scratch<float>(tokens * E);
    Blocks<Operand> multiply(call, tokens, E);
    Rows route(call);
    for (int64_t i = take(); i < items; i = take()) {
      const int64_t first = i * tokens, count = std::min(tokens, T - first);
      multiply(first, count, 0, E, logits.get());
      for (int64_t t = 0; t < count; ++t) route(first + t, &logits[t * E]);
    }
  });
}
#else
constexpr bool kBlocks = false;
template <class Operand>
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
  if (call.T == 0) return {call.weights, call.ids};
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  // Where the ways meet, with E = 128 and H = 2048 on 2 cores: tiles for dots at T = 8 take 14 us for 38, blocks for
  // tiles at 1024 391 for 467, and float blocks for dots at 64 239 for 305.
  const bool tiles = call.T > 4 && tiles_possible(call), pairs = call.H % 2 == 0 && !call.norm_weight.defined();
  if (kBlocks && tiles && pairs && call.T > 256) {
    by_blocks<at::BFloat16>(call);
  } else if (tiles) {
    by_tiles(call);
  } else if (kBlocks && call.T > 32) {
    by_blocks<float>(call);
  } else {
    by_dots(call);
  }
  return {call.weights, call.ids};
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) { m.impl("gate", &moe_metal::gate); }
