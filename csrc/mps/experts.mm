#include <torch/library.h>

#include <bit>

#include "contract.h"
#include "mps/launch.h"

namespace moe_metal {
namespace {

// Decode reads each slot's weights, prefill each chosen expert's once, but sorts first and pads tiles to 16 slots. With
// as many slots as experts, random routing chooses 63 % of the experts: decode would read 1.6 times the bytes, less
// what the cache spares, which is where the two meet. A few slots are decode's on any model.
bool is_decode(const Experts& call) { return call.T * call.K <= std::max<int64_t>(call.E, 16); }

// ---------------------------------------------------------------------------------------------- weights

bool all_multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value % of == 0; });
}

// `step` leads from one row to the next in memory, `run` rows follow one another like this.
WeightParams weight_params(const Weight& weight, int64_t row, int64_t up, int64_t step, int64_t run) {
  const int64_t elements = 16 / weight.data.element_size(), offset = weight.data.storage_offset();
  WeightLayout layout;
  if (weight.column <= step) {
    const bool fits = all_multiples(elements, {offset, weight.expert, row, up, weight.columns});
    layout = weight.column == 1 && fits ? WeightLayout::rows_wide : WeightLayout::rows;
  } else {
    const bool fits = all_multiples(elements, {offset, weight.expert, weight.column, run});
    layout = step == 1 && fits ? WeightLayout::columns_wide : WeightLayout::columns;
  }
  return {.expert = weight.expert, .row = row, .column = weight.column, .up = up, .layout = layout, .split = 1};
}

ExpertsParams experts_params(const Experts& call) {
  const bool interleaved = call.step == 2;
  const int64_t elements = 16 / call.x.element_size();
  const Weight &gate_up = call.gate_up, &down = call.down;
  const int64_t row = gate_up.row * call.step, up = gate_up.row * call.up;
  to_uint(call.T * call.K);  // slots are counted in 32 bits
  return {
      .T = to_uint(call.T),
      .E = to_uint(call.E),
      .K = to_uint(call.K),
      .H = to_uint(call.H),
      .I = to_uint(call.I),
      .long_ids = call.ids.scalar_type() == at::kLong,
      .wide_x = all_multiples(elements, {call.x.storage_offset(), call.H}),
      .interleaved = interleaved,
      .has_shared = call.shared.defined(),
      .has_residual = call.residual.defined(),
      .weights = parameter_type(call.weights),
      .gate_up_bias = parameter_type(call.gate_up_bias),
      .down_bias = parameter_type(call.down_bias),
      .shared_gate = parameter_type(call.shared_gate),
      .activation = call.params,
      .gate_up = weight_params(gate_up, row, up, gate_up.row, call.step * call.I),
      .down = weight_params(down, down.row, 0, down.row, call.H),
  };
}

// ---------------------------------------------------------------------------------------------- decode

// In the order of WeightLayout.
Kernels decode_gate_up[] = {{"experts_decode", "experts_gate_up_rows_wide", 32 * kChunkSimdgroups},
                            {"experts_decode", "experts_gate_up_rows", 32 * kChunkSimdgroups},
                            {"experts_decode", "experts_gate_up_columns_wide", 32 * kMaxSplit},
                            {"experts_decode", "experts_gate_up_columns", 32 * kMaxSplit}};
Kernels decode_down[] = {{"experts_decode", "experts_down_rows_wide", 32 * kChunkSimdgroups},
                         {"experts_decode", "experts_down_rows", 32 * kChunkSimdgroups},
                         {"experts_decode", "experts_down_columns_wide", 32 * kMaxSplit},
                         {"experts_decode", "experts_down_columns", 32 * kMaxSplit}};

// Cuts the rows of one product. A simdgroup does kChunkRows rows, or a threadgroup's do `tile` rows together; where
// that leaves too few simdgroups to keep 80 cores busy (the largest M), more of them share the columns of the same
// rows. x: slots or tokens; rows: of weights for each of them; columns: to sum over.
Grid cut(WeightParams& weight, int64_t x, int64_t rows, int64_t columns, int64_t tile, int64_t element_size) {
  constexpr int64_t kEnough = 80 * 32;
  const bool by_rows = weight.layout == WeightLayout::rows_wide || weight.layout == WeightLayout::rows;
  const int64_t groups = x * ceil_div(rows, by_rows ? kChunkRows : tile);
  const int64_t piece = by_rows ? 512 / element_size : 16;  // columns that are worth another simdgroup
  const uint32_t most = by_rows ? kChunkSimdgroups : kMaxSplit;
  weight.split = by_rows ? 1 : static_cast<uint32_t>(tile / 32);  // a tile's last sums take a thread per row
  while (weight.split < most && weight.split * piece < columns && weight.split * groups < kEnough) weight.split *= 2;
  if (by_rows) return {x, ceil_div(rows, kChunkSimdgroups / weight.split * kChunkRows), 32 * kChunkSimdgroups};
  return {x, ceil_div(rows, tile), static_cast<int>(32 * weight.split)};
}

void decode(const Experts& call, ExpertsParams params) {
  const at::ScalarType dtype = call.x.scalar_type();
  const int64_t slots = call.T * call.K;
  // The vector is read like the rows.
  if (params.gate_up.layout == WeightLayout::rows_wide && !params.wide_x) params.gate_up.layout = WeightLayout::rows;
  const int64_t size = call.x.element_size();
  const Grid gate_up_grid = cut(params.gate_up, slots, 2 * call.I, call.H, kTileRows, size);
  const Grid down_grid = cut(params.down, call.T, call.H, call.K * call.I, kDownColumnRows, size);
  const Tensor inner = at::empty({slots, call.I}, call.x.options().dtype(at::kFloat));
  launch({{decode_gate_up[static_cast<int>(params.gate_up.layout)][dtype], gate_up_grid, call.x, call.ids,
           call.gate_up.data, call.gate_up_bias, inner, params},
          {decode_down[static_cast<int>(params.down.layout)][dtype], down_grid, inner, call.ids, call.weights,
           call.down.data, call.down_bias, call.shared, call.shared_gate, call.residual, call.output, params}});
}

// ---------------------------------------------------------------------------------------------- prefill

Kernel sort_kernel{"experts_prefill", "experts_sort", -1, 1024};
Kernels prefill_gate_up[] = {{"experts_prefill", "experts_gate_up_tiles16", kTileThreads},
                             {"experts_prefill", "experts_gate_up_tiles32", kTileThreads},
                             {"experts_prefill", "experts_gate_up_tiles64", kTileThreads}};
Kernels prefill_down[] = {{"experts_prefill", "experts_down_tiles16", kTileThreads},
                          {"experts_prefill", "experts_down_tiles32", kTileThreads},
                          {"experts_prefill", "experts_down_tiles64", kTileThreads}};
Kernels combine_kernels("experts_prefill", "experts_combine", 256);

// Slots of a tile: 16, 32 or 64. Rows that only pad cost as much as others, so a tile is at most about as large as an
// expert's share. -> 0, 1 or 2
int tile_size(int64_t slots, int64_t experts) {
  const int64_t share = slots / experts;
  return share > 48 ? 2 : share > 24 ? 1 : 0;
}

// Memory beyond the inputs: 4 * T * K * (H + I + 1) + 4 * (E + 1) bytes.
void prefill(const Experts& call, const ExpertsParams& params) {
  const at::ScalarType dtype = call.x.scalar_type();
  const int64_t slots = call.T * call.K, size = tile_size(slots, call.E), rows = 16 << size;
  // Each of the experts that can be in use may leave one tile unfilled.
  const int64_t tiles = (slots + std::min(call.E, slots) * (rows - 1)) / rows;
  const int64_t bands = ceil_div(tiles, kBand) * kBand;
  const auto floats = call.x.options().dtype(at::kFloat), ints = call.x.options().dtype(at::kInt);
  const Tensor order = at::empty({slots}, ints), offsets = at::empty({call.E + 1}, ints);
  const Tensor inner = at::empty({slots, call.I}, floats), outputs = at::empty({slots, call.H}, floats);
  const int sort_threads = static_cast<int>(std::min<int64_t>(ceil_div(slots, 32) * 32, 1024));
  launch({{sort_kernel, {call.E, 1, sort_threads}, call.ids, order, offsets, params},
          {prefill_gate_up[size][dtype],
           {bands * ceil_div(call.I, kTileInner), 1, kTileThreads},
           call.x,
           order,
           offsets,
           call.gate_up.data,
           call.gate_up_bias,
           inner,
           params},
          {prefill_down[size][dtype],
           {bands * ceil_div(call.H, kTileRows), 1, kTileThreads},
           inner,
           order,
           offsets,
           call.down.data,
           call.down_bias,
           outputs,
           params},
          {combine_kernels[dtype],
           {call.T, ceil_div(call.H, 256), 256},
           outputs,
           call.ids,
           call.weights,
           call.shared,
           call.shared_gate,
           call.residual,
           call.output,
           params}});
}

void run(const Experts& call) {
  TORCH_CHECK(call.gate_up.format == Format::dense, "moe_metal::experts: format: expected dense on mps, got ",
              kFormats[static_cast<int>(call.gate_up.format)]);
  const ExpertsParams params = experts_params(call);
  is_decode(call) ? decode(call, params) : prefill(call, params);
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("experts", &moe_metal::experts<moe_metal::run>); }
