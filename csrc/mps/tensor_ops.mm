// See tensor_ops.h.
#include "mps/tensor_ops.h"

namespace moe_metal {
namespace {

// Indexed by tile_size.
FormatKernels products[] = {{"tensor_ops", "tensor_products16", 32 * product_simdgroups(16), "tiles16"},
                            {"tensor_ops", "tensor_products32", 32 * product_simdgroups(32), "tiles32"},
                            {"tensor_ops", "tensor_products64", 32 * product_simdgroups(64), "tiles64"}};

// matmul2d has 32-bit offsets in an operand, relative to the tile's first element.
bool fits_32_bits(int64_t stride, int64_t rows, int64_t columns) {
  return bounded_product({stride, rows}) + columns <= std::numeric_limits<int32_t>::max();
}

// matmul2d reads dense rows directly. Packed rows are unpacked without a check for the end of a row.
bool fits(const Weight& weight) {
  if (weight_params(weight, weight.rows).layout != WeightLayout::rows_wide) return false;
  if (!weight.format->is_dense()) return weight.columns % kProductColumns == 0;
  return weight.gap == 0 && fits_32_bits(weight.row, kProductRows, weight.columns);
}

}  // namespace

bool has_tensor_product(const Tensor& x, const Weight& weight, int size) {
  return x.element_size() == 2 && wide_rows(x, weight.columns) && fits(weight) && has_tensor_ops() &&
         compiles(products[size](x.scalar_type(), weight.format));
}

void tensor_product(const Tensor& x, const Weight& weight, const Tensor& bias, const RowTiles& tiles,
                    const Tensor& output) {
  const int64_t rows = x.numel() / weight.columns, tile_rows = 16 << tiles.size;
  const bool is_listed = tiles.list.defined();
  const int64_t count = is_listed ? tiles.count : ceil_div(rows, tile_rows);
  const int64_t together = std::min(tuning().tiles_per_band, count);
  const ProductParams params = {.rows = to_uint(rows),
                                .N = to_uint(weight.rows),
                                .columns = to_uint(weight.columns),
                                .tiles = is_listed ? to_uint(count) : 0,
                                .tiles_per_band = to_uint(together),
                                .bias = parameter_type(bias),
                                .weight = weight_params(weight, weight.rows)};
  const Grid grid = {ceil_div(count, together) * together * ceil_div(weight.rows, kProductRows), 1,
                     static_cast<int>(32 * product_simdgroups(tile_rows))};
  launch(products[tiles.size](x.scalar_type(), weight.format), grid, x, tiles.list, weight.data, weight.scale,
         weight.offset, bias, output, params);
}

}  // namespace moe_metal
