// `linear` in bfloat16 for many tokens, with the products of x86/tiles.h.
#include "cpu/item_rows.h"
#include "cpu/processor_ways.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/weight_tile_rows.h"

namespace moe_metal {
namespace {

// x as right operands: tiles of 16 rows.
Tensor pack_rows_of_x(const Linear& call) {
  const int64_t tiles = at::divup(call.T, kTile), size = at::divup(call.H, kDepth) * kTileSize;
  const Tensor packed = empty({tiles, size}, call.x.options());
  const at::BFloat16* x = elements<at::BFloat16>(call.x);
  at::BFloat16* to = packed.mutable_data_ptr<at::BFloat16>();
  parallel_work_queue(tiles, [&](auto next_item) {
    for (int64_t g = next_item(); g < tiles; g = next_item()) {
      const int64_t first = g * kTile;
      pack_right([&](int64_t i) { return x + (first + i) * call.H; }, call.T - first, call.H, to + g * size);
    }
  });
  return packed;
}

// Multiplies some rows of the weight by all tokens. Each thread has its own.
class LinearTiles {
 public:
  LinearTiles(const Linear& call, const Tensor& x, int64_t rows)
      : call_(call),
        x_{elements<at::BFloat16>(x), x.size(1), call.T},
        rows_(rows),
        weight_(call.weight, rows / kRows) {}

  // The rows of a work item. With many tokens it has as many as half of an L2 cache of 1 MB holds, so that a few tiles
  // of tokens are in the other half while they are multiplied by all of these rows. 4096 x 2048 with 4096 tokens takes
  // 0.91 to 0.95 of the time of 32 rows on a Zen 4, and 0.79 with AMX.
  static int64_t rows_of_item(const Linear& call) {
    if (WeightTileRows::transposed(call.weight)) return WeightTileRows::kTransposed;
    if (call.T <= kTokenTiles * kTile) return kRows;
    return rows_for_threads(call.N, 8, std::clamp<int64_t>(items_in_half_of_l2(call.H), 1, 4));
  }

  void operator()(int64_t first) {
    const int64_t end = std::min(first + rows_, call_.N);
    if (WeightTileRows::transposed(call_.weight)) weight_.read_transposed(0, 0, first, end - first, 1);
    for (int64_t row = first, which = 0; row < end; row += kRows) {
      for (int64_t i = 0; i < 2; ++i)
        weight_.read(which++, tile_row(row + i * kTile), tile_row(row + kRows + i * kTile));
    }
    const int64_t pairs = at::divup(end - first, kRows);
    weight_.multiply(pairs, x_, [&](int64_t pair, int64_t g, const auto& upper, const auto& lower) {
      const int64_t row = first + pair * kRows, token = g * kTile;
      read_bias(call_.bias, row, 1, std::min(kRows, call_.N - row), bias_);
      by_tokens(upper, lower, values_);
      for (int64_t n = 0; n < std::min(kTile, call_.T - token); ++n) write(token + n, row, values_[n]);
    });
  }

 private:
  TileRowRange tile_row(int64_t row) const { return {0, row, 1, std::clamp<int64_t>(call_.N - row, 0, kTile)}; }

  void write(int64_t token, int64_t row, const float* values) const {
    auto* to = call_.output.mutable_data_ptr<at::BFloat16>() + token * call_.N + row;
    for_each_vector(std::min(kRows, call_.N - row),
                    [&](int64_t r, auto n) { store(to + r, Vec::loadu(values + r) + Vec::loadu(bias_ + r), n); });
  }

  const Linear& call_;
  const TokenTiles x_;
  const int64_t rows_;
  WeightTileRows weight_;
  float bias_[kRows];
  alignas(64) float values_[kTile][2 * kTile];
};

bool linear_by_tiles(const Linear& call) {
  if (!linear_fits_tiles(call)) return false;
  const Tensor x = pack_rows_of_x(call);
  const int64_t rows = LinearTiles::rows_of_item(call), items = at::divup(call.N, rows);
  parallel_work_queue(items, [&](auto next_item) {
    const TileShapes shapes;
    LinearTiles work(call, x, rows);
    for (int64_t item = next_item(); item < items; item = next_item()) work(item * rows);
  });
  return true;
}

[[maybe_unused]] const bool kOffered = (processor_ways().linear = linear_by_tiles, true);

}  // namespace
}  // namespace moe_metal
