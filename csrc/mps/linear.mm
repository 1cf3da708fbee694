#include "mps/tensor_ops.h"
#include "ops.h"

namespace moe_metal {
namespace {

FormatKernels wide_rows_kernels("linear", "linear_rows_wide", 32 * kChunkSimdgroups, "rows_wide");
FormatKernels rows_kernels("linear", "linear_rows", 32 * kChunkSimdgroups, "rows");
// Kernels that multiply 2 or 4 tokens together.
FormatKernels several_kernels[] = {{"linear", "linear_rows2_wide", 32 * kChunkSimdgroups, "rows2_wide"},
                                   {"linear", "linear_rows4_wide", 32 * kChunkSimdgroups, "rows4_wide"}};
// Indexed by tile_size.
FormatKernels tile_kernels[] = {{"linear", "linear_tiles16", kTileThreads, "tiles16"},
                                {"linear", "linear_tiles32", kTileThreads, "tiles32"},
                                {"linear", "linear_tiles64", kTileThreads, "tiles64"}};
FormatKernels wide_tile_kernels[] = {{"linear", "linear_tiles16_wide", kTileThreads, "tiles16_wide"},
                                     {"linear", "linear_tiles32_wide", kTileThreads, "tiles32_wide"},
                                     {"linear", "linear_tiles64_wide", kTileThreads, "tiles64_wide"}};

void at_once(const Linear& call) {
  const at::ScalarType dtype = call.x.scalar_type();
  const Weight& weight = call.weight;
  LinearParams params = {.T = to_uint(call.T),
                         .N = to_uint(call.N),
                         .H = to_uint(call.H),
                         .wide_x = wide_rows(call.x, call.H),
                         .bias = parameter_type(call.bias),
                         .weight = weight_params(weight, call.N)};
  if (call.T > tuning().few_tokens) {
    const int size = tile_size(call.T);
    if (is_worth(tuning().tensor_ops, call.T) && has_tensor_product(call.x, weight, size)) {
      return tensor_product(call.x, weight, call.bias, {.size = size}, call.output);
    }
    const int64_t tiles = ceil_div(call.T, 16 << size), band = std::min(tuning().tiles_per_band, tiles);
    params.tiles_per_band = to_uint(band);
    const Grid grid = {ceil_div(tiles, band) * band * ceil_div(call.N, tile_weight_rows(16 << size)), 1, kTileThreads};
    const bool wide = params.wide_x && params.weight.layout == WeightLayout::rows_wide;
    launch((wide ? wide_tile_kernels : tile_kernels)[size](dtype, weight.format), grid, call.x, weight.data,
           weight.scale, weight.offset, call.bias, call.output, params);
    return;
  }
  const bool dense = weight.format->is_dense();
  const bool wide =
      params.wide_x && (dense ? params.weight.layout == WeightLayout::rows_wide : whole_pieces(weight, params.weight));
  const int64_t together = wide && call.T > 1 ? std::min<int64_t>(tuning().tokens_together, call.T > 2 ? 4 : 2) : 1;
  FormatKernels& kernels = together > 1 ? several_kernels[together / 4] : wide ? wide_rows_kernels : rows_kernels;
  const Grid grid =
      grid_of(params.weight, row_cut(weight, call.x.element_size()), ceil_div(call.T, together), call.N, call.H);
  launch(kernels(dtype, weight.format), grid, call.x, weight.data, weight.scale, weight.offset, call.bias, call.output,
         params);
}

}  // namespace

void mps::run_linear(const Linear& call) {
  const int64_t count = tokens_at_once(call.T, 2.0 * call.N * call.H);
  if (count == call.T) return at_once(call);
  for (int64_t first = 0; first < call.T; first += count) {
    Linear some = call;
    some.T = std::min(count, call.T - first);
    some.x = rows_of(call.x, call.T, first, some.T);
    some.output = rows_of(call.output, call.T, first, some.T);
    at_once(some);
  }
}

}  // namespace moe_metal
