// The op linear. dispatch() chooses between three ways.
#include "mps/tensor_ops.h"
#include "ops.h"

namespace moe_metal {
namespace {

FormatKernels wide_rows_kernels("linear", "linear_rows_wide", 32 * kRowSimdgroups, "rows_wide");
FormatKernels rows_kernels("linear", "linear_rows", 32 * kRowSimdgroups, "rows");
// Kernels that multiply 2 or 4 tokens together.
FormatKernels several_kernels[] = {{"linear", "linear_rows2_wide", 32 * kRowSimdgroups, "rows2_wide"},
                                   {"linear", "linear_rows4_wide", 32 * kRowSimdgroups, "rows4_wide"}};
// Indexed by tile_size.
FormatKernels tile_kernels[] = {{"linear", "linear_tiles16", kTileThreads, "tiles16"},
                                {"linear", "linear_tiles32", kTileThreads, "tiles32"},
                                {"linear", "linear_tiles64", kTileThreads, "tiles64"}};
FormatKernels wide_tile_kernels[] = {{"linear", "linear_tiles16_wide", kTileThreads, "tiles16_wide"},
                                     {"linear", "linear_tiles32_wide", kTileThreads, "tiles32_wide"},
                                     {"linear", "linear_tiles64_wide", kTileThreads, "tiles64_wide"}};

LinearParams linear_params(const Linear& call) {
  return {.T = to_uint(call.T),
          .N = to_uint(call.N),
          .H = to_uint(call.H),
          .wide_x = wide_rows(call.x, call.H) && wide_rows(call.x, call.token_stride()) &&
                    wide_rows(call.x, call.head_stride()),
          .bias = parameter_type(call.bias),
          .heads = to_uint(call.heads),
          .token_stride = to_uint(call.token_stride()),
          .head_stride = to_uint(call.head_stride()),
          .weight = weight_params(call.weight, call.N)};
}

// Reads the weight for each token, or for a few tokens together.
void few_tokens(const Linear& call, LinearParams params) {
  const Weight& weight = call.weight;
  const bool is_wide =
      weight.format->is_dense() ? params.weight.layout == WeightLayout::rows_wide : whole_chunks(weight, params.weight);
  const bool wide = params.wide_x && is_wide;
  const int64_t together =
      wide && call.heads == 1 && call.T > 1 ? std::min<int64_t>(tuning().tokens_together, call.T > 2 ? 4 : 2) : 1;
  FormatKernels& kernels = together > 1 ? several_kernels[together / 4] : wide ? wide_rows_kernels : rows_kernels;
  const Grid grid = grid_of(params.weight, row_cut(weight, call.x.element_size()),
                            ceil_div(call.T * call.heads, together), call.N, call.H);
  launch(kernels(call.x.scalar_type(), weight.format), grid, call.x, weight.data, weight.scale, weight.offset,
         call.bias, call.output, params);
}

void tiles(const Linear& call, LinearParams params, int size) {
  const Weight& weight = call.weight;
  const int64_t tiles = ceil_div(call.T, 16 << size), together = std::min(tuning().tiles_per_band, tiles);
  params.tiles_per_band = to_uint(together);
  const Grid grid = {ceil_div(tiles, together) * together * ceil_div(call.N, tile_weight_rows(16 << size)), 1,
                     kTileThreads};
  const bool wide = params.wide_x && params.weight.layout == WeightLayout::rows_wide;
  launch((wide ? wide_tile_kernels : tile_kernels)[size](call.x.scalar_type(), weight.format), grid, call.x,
         weight.data, weight.scale, weight.offset, call.bias, call.output, params);
}

// Few tokens: the weight is read for each. Many: on the matrix units if `tune` has found that faster and they can read
// this weight, else in tiles.
void dispatch(const Linear& call) {
  if (call.heads > 1 || call.T <= tuning().few_tokens) return few_tokens(call, linear_params(call));
  const int size = tile_size(call.T);
  if (is_worth(tuning().tensor_ops, call.T) && has_tensor_product(call.x, call.weight, size)) {
    return tensor_product(call.x, call.weight, call.bias, {.size = size}, call.output);
  }
  tiles(call, linear_params(call), size);
}

}  // namespace

// A long prompt takes several dispatches, since macOS kills a dispatch of seconds.
void mps::run_linear(const Linear& call) {
  const int64_t count = call.heads > 1 ? call.T : tokens_at_once(call.T, 2.0 * call.N * call.H);
  if (count == call.T) return dispatch(call);
  for (int64_t first = 0; first < call.T; first += count) {
    Linear part = call;
    part.T = std::min(count, call.T - first);
    part.x = rows_of(call.x, call.T, first, part.T);
    part.output = rows_of(call.output, call.T, first, part.T);
    dispatch(part);
  }
}

}  // namespace moe_metal
