// `gate` in bfloat16: the products of x86/tiles.h.
#include "cpu/gate.h"
#include "cpu/processor_ways.h"
#include "cpu/vector/rows.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {
namespace {

// Multiplies and routes up to four groups of 16 tokens. Each thread has its own. A normed row is float; it is split
// exactly into the sum of three bfloat16 rows of 8 bits each, and each of the three takes the place of a group.
class GateTiles {
 public:
  GateTiles(const Gate& call, const Strips& strips)
      : call_(call),
        strips_(strips),
        parts_(parts(call)),
        size_(strips.blocks() * kTileSize),
        tokens_(scratch<at::BFloat16>(kGroups * size_)),
        split_(scratch<at::BFloat16>(parts_ == 1 ? 0 : parts_ * kTile * call.H)),
        products_(strips.tiles.size()),
        logits_(scratch<float>(kGroups * kTile * call.params.experts)),
        route_(call) {}

  // The most tokens at a time.
  static int64_t most(const Gate& call) { return kGroups / parts(call) * kTile; }

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H;
    const auto* x = elements<at::BFloat16>(call_.hidden) + first * H;
    if (parts_ > 1) split_normed(x, count);
    const int64_t groups = parts_ == 1 ? at::divup(count, kTile) : parts_;
    for (int64_t g = 0; g < groups; ++g) {
      const auto* from = parts_ == 1 ? x + g * kTile * H : &split_[g * kTile * H];
      pack_right([&](int64_t i) { return from + i * H; }, parts_ == 1 ? count - g * kTile : count, H,
                 &tokens_[g * size_]);
    }
    multiply(parts_ == 1 ? count : groups * kTile);
    for (int64_t t = 0; t < count; t += kTile) collect(t);
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  struct alignas(64) Product {
    float of_group[kGroups][kTile][kTile];
  };
  static int64_t parts(const Gate& call) { return call.norm_weight.defined() ? 3 : 1; }

  void split_normed(const at::BFloat16* x, int64_t count) {
    const int64_t H = call_.H;
    const float* norm_weight = floats(call_.norm_weight);
    const Vec upper_half(std::bit_cast<float>(0xffff0000));
    for (int64_t t = 0; t < count; ++t) {
      const Vec scale(inv_rms(x + t * H, H, call_.eps));
      for_each_vector(H, [&](int64_t h, auto n) {
        Vec rest = load(x + t * H + h, n) * scale * load(norm_weight + h, n);
        for (int part = 0; part < 3; ++part) {
          const Vec top = rest & upper_half;
          store(&split_[(part * kTile + t) * H + h], top, n);
          rest = rest - top;
          // Avoids a rest of NaN for infinity, and of 0, which gives NaN with an infinite weight: the rest becomes a
          // negligible multiple of `top` instead.
          rest = Vec::blendv(top * Vec(0x1p-60f), rest, rest.abs() > Vec(0));
        }
      });
    }
  }

  // Multiplies a few columns at a time for all experts, so that the tokens stay in the L1 cache (without AMX: L2).
  void multiply(int64_t tokens) {
    const int64_t at_once = amx_available() ? 8 : 64;
    for (int64_t b = 0; b < strips_.blocks(); b += at_once) {
      for (size_t s = 0; s < strips_.tiles.size(); ++s) {
        WeightTiles weights = strips_.tiles[s];
        weights.data += b * weights.block;
        multiply_strip(weights, {&tokens_[b * kTileSize], size_, tokens}, std::min(at_once, strips_.blocks() - b),
                       products_[s].of_group, b > 0);
      }
    }
  }

  // Transposes and adds up the logits of the group that begins with token t.
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
  std::unique_ptr<at::BFloat16[], Free> tokens_, split_;
  std::vector<Product> products_;
  std::unique_ptr<float[], Free> logits_;
  RouteToken route_;
};

bool gate_by_tiles(const Gate& call) {
  if (!gate_fits_tiles(call)) return false;
  const int64_t E = call.params.experts, H = call.H;
  Strips strips(at::divup(E, kTile), H);
  for (int64_t e = 0; e < E; e += kTile) {
    strips.read(e / kTile, {elements<at::BFloat16>(call.router_weight) + e * H, H, 1, std::min(kTile, E - e), H});
  }
  const int64_t groups = at::divup(call.T, kTile), threads = at::get_num_threads();
  const int64_t block = std::min(GateTiles::most(call), at::divup(groups, threads) * kTile);
  const int64_t blocks = at::divup(call.T, block);
  parallel_work_queue(blocks, [&](auto next_item) {
    const TileShapes shapes;
    GateTiles run(call, strips);
    for (int64_t i = next_item(); i < blocks; i = next_item()) run(i * block, std::min(block, call.T - i * block));
  });
  return true;
}

[[maybe_unused]] const bool kOffered = (processor_ways().gate = gate_by_tiles, true);

}  // namespace

}  // namespace moe_metal
