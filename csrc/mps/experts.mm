// The op experts. run_experts() chooses between three ways; each has its kernels before it.
#include <ATen/ops/empty.h>

#include "mps/tensor_ops.h"
#include "ops.h"

namespace moe_metal {
namespace {

ExpertsParams experts_params(const Experts& call) {
  to_uint(call.T * call.K);  // slots are counted in 32 bits
  return {
      .T = to_uint(call.T),
      .E = to_uint(call.E),
      .K = to_uint(call.K),
      .H = to_uint(call.H),
      .I = to_uint(call.I),
      .long_ids = call.ids.scalar_type() == at::kLong,
      .wide_x = wide_rows(call.x, call.H),
      .interleaved = call.row_stride == 2,
      .bias_stride = to_uint(call.bias_stride),
      .up_bias_offset = to_uint(call.up_bias_offset),
      .has_shared = call.shared.defined(),
      .has_residual = call.residual.defined(),
      .weights = parameter_type(call.weights),
      .gate_up_bias = parameter_type(call.gate_up_bias),
      .down_bias = parameter_type(call.down_bias),
      .shared_gate = parameter_type(call.shared_gate),
      .activation = call.params,
      .gate_up = weight_params(call.gate_up, call.row_stride * call.I),
      .down = weight_params(call.down, call.H),
  };
}

// ---------------------------------------------------------------------------------------------- decode

// Indexed by WeightLayout.
FormatKernels decode_gate_up[] = {
    {"experts_decode", "experts_gate_up_rows_wide", 32 * kRowSimdgroups, "rows_wide"},
    {"experts_decode", "experts_gate_up_rows", 32 * kRowSimdgroups, "rows"},
    {"experts_columns", "experts_gate_up_columns_wide", 32 * kColumnSimdgroups, "columns_wide"},
    {"experts_columns", "experts_gate_up_columns", 32 * kColumnSimdgroups, "columns"}};
FormatKernels decode_down[] = {{"experts_decode", "experts_down_rows_wide", 32 * kRowSimdgroups, "rows_wide"},
                               {"experts_decode", "experts_down_rows", 32 * kRowSimdgroups, "rows"},
                               {"experts_columns", "experts_down_columns_wide", 32 * kColumnSimdgroups, "columns_wide"},
                               {"experts_columns", "experts_down_columns", 32 * kColumnSimdgroups, "columns"}};

// The same for two slots of an expert together.
FormatKernels gate_up_pairs{"experts_pairs", "experts_gate_up_rows2_wide", 32 * kRowSimdgroups};
FormatKernels down_pairs{"experts_pairs", "experts_down_rows2_wide", 32 * kRowSimdgroups};

// Whether two slots of an expert are multiplied together, according to a setting.
bool in_pairs(const Experts& call, int64_t percent) {
  return call.T > 1 && is_worth(percent, 100 * call.T * call.K, call.E);
}

struct Product {
  Kernel& kernel;
  Grid grid;
};

struct DecodeKernels {
  FormatKernels *single, *pairs;  // pairs may be null
  int64_t pair_items;             // how many slots or tokens along x a threadgroup of `pairs` has
};

// x: slots or tokens; rows: rows of weights for each of them; columns: columns to sum over; tile_rows: rows of a
// threadgroup if lanes are across the rows. The vector is loaded like the rows, so both must be aligned for wide loads.
Product product(const DecodeKernels& kernels, const Weight& weight, WeightParams& params, bool wide_vector, int64_t x,
                int64_t rows, int64_t columns, int64_t tile_rows, const Tensor& activations) {
  WeightLayout layout = params.layout;
  if (!weight.format->is_dense()) layout = whole_chunks(weight, params) ? WeightLayout::rows_wide : WeightLayout::rows;
  if (layout == WeightLayout::rows_wide && !wide_vector) layout = WeightLayout::rows;
  const bool by_rows = layout == WeightLayout::rows_wide || layout == WeightLayout::rows;
  const Cut cut = by_rows ? row_cut(weight, activations.element_size()) : Cut{tile_rows, 16, false};
  const bool pairs = kernels.pairs && layout == WeightLayout::rows_wide;
  FormatKernels& chosen = pairs ? *kernels.pairs : kernels.single[static_cast<int>(layout)];
  Kernel& kernel = chosen(activations.scalar_type(), weight.format);
  return {kernel, pairs ? grid_of(params, cut, ceil_div(x, kernels.pair_items), rows, columns * kernels.pair_items)
                        : grid_of(params, cut, x, rows, columns)};
}

void decode(const Experts& call) {
  ExpertsParams params = experts_params(call);
  const int64_t slots = call.T * call.K;
  const bool pairs = in_pairs(call, tuning().gate_up_pairs_percent);
  // One simdgroup lists the experts of two tokens, a lane for each slot.
  const bool token_pairs = in_pairs(call, tuning().down_pairs_percent) && 2 * call.K <= kSimdgroup;
  const Product gate_up = product({decode_gate_up, pairs ? &gate_up_pairs : nullptr, 1}, call.gate_up, params.gate_up,
                                  params.wide_x, slots, 2 * call.I, call.H, kColumnRows, call.x);
  const Product down = product({decode_down, token_pairs ? &down_pairs : nullptr, 2}, call.down, params.down, true,
                               call.T, call.H, call.K * call.I, kDownColumnRows, call.x);
  params.inner_reordered = !call.down.format->is_dense();  // the lanes of packed rows read whole steps of it
  params.inner_length = to_uint(params.inner_reordered ? ceil_div(call.I, kPackedStep) * kPackedStep : call.I);
  const Tensor inner = at::empty({slots, params.inner_length}, call.x.options().dtype(at::kFloat));
  launch({{gate_up.kernel, gate_up.grid, call.x, call.ids, call.gate_up.data, call.gate_up.scale, call.gate_up.offset,
           call.gate_up_bias, inner, params},
          {down.kernel, down.grid, inner, call.ids, call.weights, call.down.data, call.down.scale, call.down.offset,
           call.down_bias, call.shared, call.shared_gate, call.residual, call.output, params}});
}

// ---------------------------------------------------------------------------------------------- prefill: sorting

Kernel sort_kernel{"experts_slots", "experts_sort", -1, kFormats, 1024, "sort"};
constexpr int kRowThreads = 256;

// One thread per element: rows along x, tiles of their elements along y.
Grid grid_of_rows(int64_t rows, int64_t elements) { return {rows, ceil_div(elements, kRowThreads), kRowThreads}; }

int size_of_tiles(const Experts& call) { return tile_size(call.T * call.K / call.E); }

// Sets the size of the list of tiles: each expert may have one incomplete tile.
ExpertsParams prefill_params(const Experts& call) {
  ExpertsParams params = experts_params(call);
  params.tile_rows = 16 << size_of_tiles(call);
  params.tiles = to_uint(int64_t{params.T} * params.K / params.tile_rows + params.E);
  params.tiles_per_band = to_uint(tuning().tiles_per_band);
  return params;
}

// Memory for the slots sorted by expert: their order, and the list of tiles followed by the end of each expert's slots.
struct Sorted {
  Tensor order, tiles;
};

Sorted sorted(const Experts& call, const ExpertsParams& params) {
  const auto ints = call.x.options().dtype(at::kInt);
  return {at::empty({call.T * call.K}, ints), at::empty({int64_t{4} * params.tiles + call.E}, ints)};
}

// One threadgroup per expert; its threads divide all slots.
Dispatch sort(const Experts& call, const Sorted& slots, const ExpertsParams& params) {
  const int64_t threads = std::min<int64_t>(ceil_div(call.T * call.K, 32) * 32, 1024);
  return {sort_kernel, {call.E, 1, static_cast<int>(threads)}, call.ids, slots.order, slots.tiles, params};
}

// ---------------------------------------------------------------------------------------------- prefill: tiles

// Indexed by tile_size.
FormatKernels gate_up_tiles[] = {{"experts_prefill", "experts_gate_up_tiles16", kTileThreads, "tiles16"},
                                 {"experts_prefill", "experts_gate_up_tiles32", kTileThreads, "tiles32"},
                                 {"experts_prefill", "experts_gate_up_tiles64", kTileThreads, "tiles64"}};
FormatKernels gate_up_tiles_wide[] = {
    {"experts_prefill", "experts_gate_up_tiles16_wide", kTileThreads, "tiles16_wide"},
    {"experts_prefill", "experts_gate_up_tiles32_wide", kTileThreads, "tiles32_wide"},
    {"experts_prefill", "experts_gate_up_tiles64_wide", kTileThreads, "tiles64_wide"}};
FormatKernels down_tiles[] = {{"experts_prefill", "experts_down_tiles16", kTileThreads, "tiles16"},
                              {"experts_prefill", "experts_down_tiles32", kTileThreads, "tiles32"}};
FormatKernels down_tiles_wide[] = {{"experts_prefill", "experts_down_tiles16_wide", kTileThreads, "tiles16_wide"},
                                   {"experts_prefill", "experts_down_tiles32_wide", kTileThreads, "tiles32_wide"}};
Kernels combine_kernels("experts_slots", "experts_combine", kRowThreads, "combine");

// The grid for all tiles of the list, each divided into tiles of size `size` (a tile_size), and `rows` rows of weights.
Grid grid_of_tiles(const ExpertsParams& params, int64_t size, int64_t rows) {
  const int64_t tile_rows = 16 << size, tiles = params.tiles * (params.tile_rows / tile_rows);
  return {ceil_div(tiles, params.tiles_per_band) * params.tiles_per_band * ceil_div(rows, tile_weight_rows(tile_rows)),
          1, kTileThreads};
}

// Scratch memory: 4 * T * K * (H + I + 1) bytes, and the list of tiles.
void prefill_tiles(const Experts& call, const ExpertsParams& params) {
  const at::ScalarType dtype = call.x.scalar_type();
  const Weight &gate_up = call.gate_up, &down = call.down;
  const int64_t slots = call.T * call.K;
  const int size = size_of_tiles(call), down_size = std::min(size, 1);
  const auto floats = call.x.options().dtype(at::kFloat);
  const Sorted by_expert = sorted(call, params);
  const auto& [order, tiles] = by_expert;
  const Tensor inner = at::empty({slots, call.I}, floats), outputs = at::empty({slots, call.H}, floats);
  const bool wide_gate_up = params.wide_x && params.gate_up.layout == WeightLayout::rows_wide;
  const bool wide_down = wide_rows(inner, call.I) && params.down.layout == WeightLayout::rows_wide;
  launch({sort(call, by_expert, params),
          {(wide_gate_up ? gate_up_tiles_wide : gate_up_tiles)[size](dtype, gate_up.format),
           grid_of_tiles(params, size, 2 * call.I), call.x, order, tiles, gate_up.data, gate_up.scale, gate_up.offset,
           call.gate_up_bias, inner, params},
          {(wide_down ? down_tiles_wide : down_tiles)[down_size](dtype, down.format),
           grid_of_tiles(params, down_size, call.H), inner, order, tiles, down.data, down.scale, down.offset,
           call.down_bias, outputs, params},
          {combine_kernels[dtype], grid_of_rows(call.T, call.H), outputs, call.ids, call.weights, call.shared,
           call.shared_gate, call.residual, call.output, params}});
}

// ---------------------------------------------------------------------------------------------- prefill: matrix units

Kernel gather_kernel{"experts_slots", "experts_gather", -1, kFormats, kRowThreads, "gather"};
Kernels activate_kernels("experts_slots", "experts_activate", kRowThreads, "activate");
Kernels combine_sorted_kernels("experts_slots", "experts_combine_sorted", kRowThreads, "combine_sorted");

bool has_tensor_products(const Experts& call, const ExpertsParams& params) {
  const int size = size_of_tiles(call);
  const at::ScalarType dtype = call.x.scalar_type();
  return params.wide_x && has_tensor_product(call.x, call.gate_up, size) &&
         has_tensor_product(call.x, call.down, size) && !gather_kernel.is_refused &&
         !activate_kernels[dtype].is_refused && !combine_sorted_kernels[dtype].is_refused;
}

// Scratch memory: 2 * T * K * (2H + 3I + 4) bytes, and the list of tiles.
void prefill_tensor_ops(const Experts& call, const ExpertsParams& params) {
  const at::ScalarType dtype = call.x.scalar_type();
  const int64_t slots = call.T * call.K;
  const Sorted by_expert = sorted(call, params);
  const Tensor& order = by_expert.order;
  const Tensor index_of = at::empty({slots}, order.options()), rows = at::empty({slots, call.H}, call.x.options());
  const Tensor ends = by_expert.tiles.narrow(0, int64_t{4} * params.tiles, call.E);
  const auto multiply = [&](const Tensor& x, const Weight& weight) {
    const Tensor product = at::empty({slots, weight.rows}, x.options());
    tensor_product(x, weight, Tensor(), {by_expert.tiles, params.tiles, size_of_tiles(call)}, product);
    return product;
  };
  launch({sort(call, by_expert, params),
          {gather_kernel, grid_of_rows(slots, call.H / 8), call.x, order, ends, rows, index_of, params}});
  const Tensor both = multiply(rows, call.gate_up);
  const Tensor inner = at::empty({slots, call.I}, call.x.options());
  launch(activate_kernels[dtype], grid_of_rows(slots, call.I), both, call.ids, order, ends, call.gate_up_bias, inner,
         params);
  const Tensor results = multiply(inner, call.down);
  launch(combine_sorted_kernels[dtype], grid_of_rows(call.T, call.H), results, index_of, call.ids, call.weights,
         call.down_bias, call.shared, call.shared_gate, call.residual, call.output, params);
}

// ---------------------------------------------------------------------------------------------- the choice

// The call for tokens first to first + count.
Experts for_tokens(const Experts& call, int64_t first, int64_t count) {
  if (count == call.T) return call;
  Experts part = call;
  part.T = count;
  for (Tensor Experts::* tensor : {&Experts::x, &Experts::weights, &Experts::ids, &Experts::shared,
                                   &Experts::shared_gate, &Experts::residual, &Experts::output}) {
    part.*tensor = rows_of(call.*tensor, call.T, first, count);
  }
  return part;
}

}  // namespace

// Decode reads the weights for each slot: it is for few slots per expert, and for up to 16 slots unless the setting
// is 0. Prefill sorts the slots and reads the weights once for each expert: on the matrix units if the setting says so
// and they can read these weights, else in tiles. A long prompt takes several dispatches, since macOS kills a dispatch
// of seconds.
void mps::run_experts(const Experts& call) {
  const int64_t slots = call.T * call.K;
  const int64_t percent = tuning().decode_max_slots_percent;
  if (percent > 0 && slots <= std::max<int64_t>(call.E * percent / 100, 16)) return decode(call);
  const int64_t count = tokens_at_once(call.T, 4.0 * call.K * call.H * call.I);
  for (int64_t first = 0; first < call.T; first += count) {
    const Experts part = for_tokens(call, first, std::min(count, call.T - first));
    const ExpertsParams params = prefill_params(part);
    if (is_worth(tuning().tensor_ops, part.T * part.K, part.E) && has_tensor_products(part, params)) {
      prefill_tensor_ops(part, params);
    } else {
      prefill_tiles(part, params);
    }
  }
}

}  // namespace moe_metal
