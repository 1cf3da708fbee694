// The host side of shaders/weights.h: the params of a weight in any format, and how the work on its rows is divided.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "contract/experts.h"
#include "mps/launch.h"
#include "mps/tuning.h"

namespace moe_metal {

inline bool all_multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value % of == 0; });
}

// Whether all rows of a contiguous tensor are aligned for loads of 16 bytes.
inline bool wide_rows(const Tensor& tensor, int64_t length) {
  return all_multiples(16 / tensor.element_size(), {tensor.storage_offset(), length});
}

inline NumberType number_type(const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat ? NumberType::float32 : dtype == at::kHalf ? NumberType::float16 : NumberType::bfloat16;
}
inline NumberType scale_type(const Weight& weight) {
  if (weight.format->scale == ScaleType::e8m0) return NumberType::e8m0;
  return weight.format->scale == ScaleType::e4m3 ? NumberType::e4m3 : number_type(weight.scale);
}

inline ScaleParams scale_params(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const int64_t size = tensor.element_size();
  return {.expert = tensor.dim() > 2 ? tensor.stride(-3) * size : 0,
          .row = tensor.stride(-2) * size,
          .group = tensor.stride(-1) * size};
}
// One factor per matrix.
inline ScaleParams factor_params(const Tensor& tensor) {
  return {.expert = tensor.defined() && tensor.dim() > 1 ? tensor.stride(-2) * tensor.element_size() : 0};
}

// Whether chunks of `columns` columns are aligned for the widest loads that their length allows. In formats with
// blocks, the length of a block counts instead.
inline bool is_aligned(const Weight& weight, int64_t columns) {
  const Format& format = *weight.format;
  const int64_t bytes = format.has_own_scales() ? format.bytes : columns * format.bits / 8;
  const int64_t width = bytes_at_once(static_cast<uint32_t>(bytes));
  return all_multiples(
      width, {weight.data.storage_offset() * weight.data.element_size(), weight.expert, weight.row, weight.gap});
}

// `neighbours`: how many consecutive rows of a transposed weight are contiguous; lanes read several of them at once.
inline WeightLayout dense_layout(const Weight& weight, int64_t neighbours) {
  const int64_t elements = 16 / weight.data.element_size(), offset = weight.data.storage_offset();
  if (weight.column <= weight.row || weight.gap != 0) {
    const bool fits = all_multiples(elements, {offset, weight.expert, weight.row, weight.gap, weight.columns});
    return weight.column == 1 && fits ? WeightLayout::rows_wide : WeightLayout::rows;
  }
  const bool fits = all_multiples(elements, {offset, weight.expert, weight.column, neighbours});
  return weight.row == 1 && fits ? WeightLayout::columns_wide : WeightLayout::columns;
}

inline WeightParams weight_params(const Weight& weight, int64_t neighbours) {
  WeightParams params = {
      .expert = weight.expert,
      .row = weight.row,
      .column = weight.column,
      .gap = weight.gap,
      .parts = 1,
      .gap_at = static_cast<uint32_t>(std::min<int64_t>(weight.half, std::numeric_limits<uint32_t>::max())),
  };
  if (weight.format->is_dense()) {
    params.layout = dense_layout(weight, neighbours);
    return params;
  }
  if (!weight.format->has_own_scales()) {
    const bool has_factor = weight.format->offset == OffsetType::factor;
    params.scale = scale_params(weight.scale);
    params.offset = has_factor ? factor_params(weight.offset) : scale_params(weight.offset);
    params.scale_type = scale_type(weight);
    params.group_shift = std::countr_zero(static_cast<uint64_t>(weight.group));
    params.has_factor = has_factor && weight.offset.defined();
  }
  params.layout = is_aligned(weight, kNarrowColumns) ? WeightLayout::rows_wide : WeightLayout::rows;
  return params;
}

// Whether all offsets within an expert's matrix, its scales and its offsets fit in 32 bits. The gap between separate
// gate and up matrices is added in 64 bits and does not count.
inline bool has_short_offsets(const Weight& weight, const WeightParams& params) {
  const int64_t last = std::max<int64_t>(weight.rows - 1, 0), groups = weight.columns >> params.group_shift;
  const auto fits = [&](int64_t row, int64_t length) {
    constexpr int64_t most = int64_t{1} << 32;
    return bounded_product({row, last}) <= most - std::min(length, most);
  };
  const Format& format = *weight.format;
  return fits(params.row, weight.columns / format.columns * format.bytes) &&
         fits(params.scale.row, params.scale.group * groups) && fits(params.offset.row, params.offset.group * groups);
}

// Whether decode can use its fast kernels, which read whole chunks of kPackedColumns. Readers of formats with a fixed
// group size support any size.
inline bool whole_chunks(const Weight& weight, const WeightParams& params) {
  const bool whole_groups = weight.format->scale_columns > 0 || weight.group >= kPackedColumns;
  return whole_groups && weight.columns % kPackedColumns == 0 && is_aligned(weight, kPackedColumns) &&
         has_short_offsets(weight, params);
}

// How decode divides the rows of one product into threadgroups.
struct Cut {
  int64_t rows;     // of a simdgroup if by_rows, else of a threadgroup
  int64_t columns;  // at least so many for another simdgroup
  bool by_rows;
};

inline Cut row_cut(const Weight& weight, int64_t element_size) {
  if (weight.format->is_dense()) return {kDotRows, 512 / element_size, true};
  return {kDotRows * (32 / kPackedLanes), kPackedStep, true};
}

// If there are too few rows to keep the GPU busy, the columns of a row are divided into parts, one per simdgroup.
// x: slots or tokens; rows: rows of weights for each of them; columns: columns to sum over.
inline Grid grid_of(WeightParams& weight, const Cut& cut, int64_t x, int64_t rows, int64_t columns) {
  const int64_t tiles = x * ceil_div(rows, cut.rows);
  const uint32_t most = cut.by_rows ? kRowSimdgroups : kColumnSimdgroups;
  weight.parts = cut.by_rows ? 1 : static_cast<uint32_t>(cut.rows / 32);  // the final sums need a thread per row
  while (weight.parts < most && weight.parts * cut.columns < columns &&
         weight.parts * tiles < tuning().target_simdgroups) {
    weight.parts *= 2;
  }
  if (cut.by_rows) {
    const int64_t simdgroups = std::max<int64_t>(weight.parts, tuning().decode_simdgroups);
    return {x, ceil_div(rows, simdgroups / weight.parts * cut.rows), static_cast<int>(32 * simdgroups)};
  }
  return {x, ceil_div(rows, cut.rows), static_cast<int>(32 * weight.parts)};
}

// The rows of `count` tokens; an undefined tensor stays undefined.
inline Tensor rows_of(const Tensor& tensor, int64_t tokens, int64_t first, int64_t count) {
  return tensor.defined() ? tensor.view({tokens, -1}).narrow(0, first, count) : tensor;
}
// How many tokens one dispatch takes if a token costs `flops`: all of them, or nearly equal parts.
inline int64_t tokens_at_once(int64_t tokens, double flops) {
  const double most = std::max(1.0, std::floor(1e6 * tuning().dispatch_mflops / flops));
  return tokens <= most ? tokens : ceil_div(tokens, static_cast<int64_t>(std::ceil(tokens / most)));
}

// Whether there are at least `least` slots (or tokens) per weight; never if `least` is 0.
inline bool is_worth(int64_t least, int64_t slots, int64_t weights = 1) {
  return least > 0 && slots >= bounded_product({least, weights});
}

// 0, 1 or 2 for tiles of 16, 32 or 64 rows: tokens, or slots of an expert. `rows` is how many use one weight.
inline int tile_size(int64_t rows) {
  return rows >= tuning().tile64_min_rows ? 2 : rows >= tuning().tile32_min_rows ? 1 : 0;
}

}  // namespace moe_metal
