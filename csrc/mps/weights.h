// The host's half of shaders/weights.h: the params of a weight in any format, and how the work on its rows is cut.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "contract.h"
#include "mps/launch.h"
#include "mps/tuning.h"

namespace moe_metal {

inline bool all_multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value % of == 0; });
}

// Rows of a contiguous tensor, which 16 bytes at a time may be loaded of.
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
// One number for each matrix.
inline ScaleParams factor_params(const Tensor& tensor) {
  return {.expert = tensor.defined() && tensor.dim() > 1 ? tensor.stride(-2) * tensor.element_size() : 0};
}

// Whether pieces of so many columns begin where the widest loads that their length allows are aligned. Pieces of blocks
// are where their parts are.
inline bool is_aligned(const Weight& weight, int64_t columns) {
  const Format& format = *weight.format;
  const int64_t bytes = format.has_own_scales() ? format.bytes : columns * format.bits / 8;
  const int64_t unit = bytes_at_once(static_cast<uint32_t>(bytes));
  return all_multiples(
      unit, {weight.data.storage_offset() * weight.data.element_size(), weight.expert, weight.row, weight.gap});
}

// `run` rows of a transposed weight are read as they follow one another.
inline WeightLayout dense_layout(const Weight& weight, int64_t run) {
  const int64_t elements = 16 / weight.data.element_size(), offset = weight.data.storage_offset();
  if (weight.column <= weight.row || weight.gap != 0) {
    const bool fits = all_multiples(elements, {offset, weight.expert, weight.row, weight.gap, weight.columns});
    return weight.column == 1 && fits ? WeightLayout::rows_wide : WeightLayout::rows;
  }
  const bool fits = all_multiples(elements, {offset, weight.expert, weight.column, run});
  return weight.row == 1 && fits ? WeightLayout::columns_wide : WeightLayout::columns;
}

inline WeightParams weight_params(const Weight& weight, int64_t run) {
  WeightParams params = {
      .expert = weight.expert,
      .row = weight.row,
      .column = weight.column,
      .gap = weight.gap,
      .split = 1,
      .gap_at = static_cast<uint32_t>(std::min<int64_t>(weight.half, std::numeric_limits<uint32_t>::max())),
  };
  if (weight.format->is_dense()) {
    params.layout = dense_layout(weight, run);
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

// Whether every byte of an expert's matrix, and of its scales and offsets, is less than 4 GB from its first. The gap
// between gate and up, where they are apart, is not counted.
inline bool has_short_places(const Weight& weight, const WeightParams& params) {
  const int64_t last = std::max<int64_t>(weight.rows - 1, 0), groups = weight.columns >> params.group_shift;
  const auto fits = [&](int64_t row, int64_t length) {
    constexpr int64_t most = int64_t{1} << 32;
    return bounded_product({row, last}) <= most - std::min(length, most);
  };
  const Format& format = *weight.format;
  return fits(params.row, weight.columns / format.columns * format.bytes) &&
         fits(params.scale.row, params.scale.group * groups) && fits(params.offset.row, params.offset.group * groups);
}

// Whether whole pieces of kPackedColumns can be read: decode's fast way. Groups that their format has one size for are
// known to its reader.
inline bool whole_pieces(const Weight& weight, const WeightParams& params) {
  const bool whole_groups = weight.format->scale_columns > 0 || weight.group >= kPackedColumns;
  return whole_groups && weight.columns % kPackedColumns == 0 && is_aligned(weight, kPackedColumns) &&
         has_short_places(weight, params);
}

// How decode cuts the rows of one product into threadgroups.
struct Cut {
  int64_t rows;     // that a simdgroup does, or that those of a threadgroup do together
  int64_t columns;  // that are worth another simdgroup
  bool by_rows;
};

inline Cut row_cut(const Weight& weight, int64_t element_size) {
  if (weight.format->is_dense()) return {kChunkRows, 512 / element_size, true};
  return {kChunkRows * (32 / kPackedLanes), kPackedLanes * kPackedColumns, true};
}

// Where so many rows leave too few simdgroups to keep the GPU busy, more of them share the columns of the same rows. x:
// slots or tokens; rows: of weights for each of them; columns: to sum over.
inline Grid grid_of(WeightParams& weight, const Cut& cut, int64_t x, int64_t rows, int64_t columns) {
  const int64_t groups = x * ceil_div(rows, cut.rows);
  const uint32_t most = cut.by_rows ? kChunkSimdgroups : kMaxSplit;
  weight.split = cut.by_rows ? 1 : static_cast<uint32_t>(cut.rows / 32);  // a tile's last sums take a thread per row
  while (weight.split < most && weight.split * cut.columns < columns &&
         weight.split * groups < tuning().enough_simdgroups) {
    weight.split *= 2;
  }
  if (cut.by_rows) {
    const int64_t simdgroups = std::max<int64_t>(weight.split, tuning().decode_simdgroups);
    return {x, ceil_div(rows, simdgroups / weight.split * cut.rows), static_cast<int>(32 * simdgroups)};
  }
  return {x, ceil_div(rows, cut.rows), static_cast<int>(32 * weight.split)};
}

// Some tokens of a tensor that has a row for each, or is not given.
inline Tensor rows_of(const Tensor& tensor, int64_t tokens, int64_t first, int64_t count) {
  return tensor.defined() ? tensor.view({tokens, -1}).narrow(0, first, count) : tensor;
}
// As many as a dispatch may have, of which `flops` are a token's: all, or about equally many each time.
inline int64_t tokens_at_once(int64_t tokens, double flops) {
  const double most = std::max(1.0, std::floor(1e6 * tuning().dispatch_mflops / flops));
  return tokens <= most ? tokens : ceil_div(tokens, static_cast<int64_t>(std::ceil(tokens / most)));
}

// Whether there are as many slots, or tokens, for each weight as a number of the GPU's demands; 0: never.
inline bool is_worth(int64_t least, int64_t slots, int64_t weights = 1) {
  return least > 0 && slots >= bounded_product({least, weights});
}

// Tokens, or slots, of a tile: 16, 32 or 64, about the share of one weight. -> 0, 1 or 2
inline int tile_size(int64_t share) {
  return share >= tuning().tile64_share ? 2 : share >= tuning().tile32_share ? 1 : 0;
}

}  // namespace moe_metal
