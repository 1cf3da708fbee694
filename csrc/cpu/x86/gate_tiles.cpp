// `gate` in bfloat16: the products of x86/tiles.h.
#include "cpu/gate.h"
#include "cpu/processor_ways.h"
#include "cpu/vector/rows.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {
namespace {

// Multiplies and routes up to four tiles of 16 tokens. Each thread has its own. A normed row is float: the exact sum of
// three bfloat16 rows, its parts, which are multiplied like three tiles of tokens.
class GateTiles {
 public:
  GateTiles(const Gate& call, const TileRows& tile_rows)
      : call_(call),
        tile_rows_(tile_rows),
        parts_(parts(call)),
        size_(tile_rows.chunks() * kTileSize),
        tokens_(scratch<at::BFloat16>(kTokenTiles * size_)),
        of_parts_(scratch<at::BFloat16>(parts_ == 1 ? 0 : parts_ * kTile * call.H)),
        products_(tile_rows.tiles.size()),
        logits_(scratch<float>(kTokenTiles * kTile * call.params.experts)),
        route_(call) {}

  // The most tokens at a time.
  static int64_t most(const Gate& call) { return kTokenTiles / parts(call) * kTile; }

  void operator()(int64_t first, int64_t count) {
    const int64_t H = call_.H;
    const auto* x = elements<at::BFloat16>(call_.hidden) + first * H;
    if (parts_ > 1) write_parts(x, count);
    const int64_t tiles = parts_ == 1 ? at::divup(count, kTile) : parts_;
    for (int64_t g = 0; g < tiles; ++g) {
      const auto* from = parts_ == 1 ? x + g * kTile * H : &of_parts_[g * kTile * H];
      pack_right([&](int64_t i) { return from + i * H; }, parts_ == 1 ? count - g * kTile : count, H,
                 &tokens_[g * size_]);
    }
    multiply(parts_ == 1 ? count : tiles * kTile);
    for (int64_t t = 0; t < count; t += kTile) collect(t);
    for (int64_t t = 0; t < count; ++t) route_(first + t, &logits_[t * call_.params.experts]);
  }

 private:
  struct alignas(64) Product {
    float of_tile[kTokenTiles][kTile][kTile];
  };
  static int64_t parts(const Gate& call) { return call.norm_weight.defined() ? 3 : 1; }

  void write_parts(const at::BFloat16* x, int64_t count) {
    const int64_t H = call_.H;
    const float* norm_weight = floats(call_.norm_weight);
    const Vec upper_half(std::bit_cast<float>(0xffff0000));
    for (int64_t t = 0; t < count; ++t) {
      const Vec scale(inv_rms(x + t * H, H, call_.eps));
      for_each_vector(H, [&](int64_t h, auto n) {
        Vec rest = load(x + t * H + h, n) * scale * load(norm_weight + h, n);
        for (int part = 0; part < 3; ++part) {
          const Vec top = rest & upper_half;
          store(&of_parts_[(part * kTile + t) * H + h], top, n);
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
    for (int64_t b = 0; b < tile_rows_.chunks(); b += at_once) {
      for (size_t s = 0; s < tile_rows_.tiles.size(); ++s) {
        WeightTiles weights = tile_rows_.tiles[s];
        weights.data += b * weights.chunk;
        multiply_tile_row(weights, {&tokens_[b * kTileSize], size_, tokens}, std::min(at_once, tile_rows_.chunks() - b),
                          products_[s].of_tile, b > 0);
      }
    }
  }

  // Transposes and adds up the logits of the tile that begins with token t.
  void collect(int64_t t) {
    const int64_t E = call_.params.experts;
    for (int64_t e = 0; e < E; e += kTile) {
      const auto& products = products_[e / kTile].of_tile;
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
  const TileRows& tile_rows_;
  const int64_t parts_, size_;
  std::unique_ptr<at::BFloat16[], Free> tokens_, of_parts_;
  std::vector<Product> products_;
  std::unique_ptr<float[], Free> logits_;
  RouteToken route_;
};

bool gate_by_tiles(const Gate& call) {
  if (!gate_fits_tiles(call)) return false;
  const int64_t E = call.params.experts, H = call.H;
  TileRows tile_rows(at::divup(E, kTile), H);
  for (int64_t e = 0; e < E; e += kTile) {
    tile_rows.read(e / kTile, {elements<at::BFloat16>(call.router_weight) + e * H, H, 1, std::min(kTile, E - e), H});
  }
  const int64_t tiles = at::divup(call.T, kTile), threads = at::get_num_threads();
  const int64_t tokens = std::min(GateTiles::most(call), at::divup(tiles, threads) * kTile);
  const int64_t items = at::divup(call.T, tokens);
  parallel_work_queue(items, [&](auto next_item) {
    const TileShapes shapes;
    GateTiles work(call, tile_rows);
    for (int64_t i = next_item(); i < items; i = next_item()) work(i * tokens, std::min(tokens, call.T - i * tokens));
  });
  return true;
}

[[maybe_unused]] const bool kOffered = (processor_ways().gate = gate_by_tiles, true);

}  // namespace
}  // namespace moe_metal
