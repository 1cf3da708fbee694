// The operands of dots.h: the rows of a tile, and the vectors.
#pragma once
#include "rows.h"
#include "weights.h"

namespace moe_metal {

template <bool is_short>
struct OffsetOf {
  using Type = long;
};
template <>
struct OffsetOf<true> {
  using Type = uint;
};

// The rows of a tile: their offsets in the expert's matrix, and this lane's sums. If gate and up are separate, every
// second row is a row of up and `gap` further.
template <typename At>
struct DotRows {
  Offsets<At, kDotRows> data, scale, offset;
  long gap;
  float sum[kDotRows];
};

// Several vectors that are multiplied by the same rows: rows of a matrix, which are `apart` elements apart.
template <typename V, uint N>
struct SeveralVectors {
  device const V* first;
  uint apart, row[N];
  device const V* at(uint t) const thread { return first + ulong(row[t]) * apart; }
};
// A lane's sums of the rows for each vector.
template <uint N>
struct SeveralSums {
  Floats<kDotRows> of[N];
};

template <typename Chunk, typename At>
void set_row(thread DotRows<At>& rows, uint r, uint row, constant WeightParams& params) {
  rows.data.at[r] = row * At(params.row);
  rows.scale.at[r] = row / Chunk::scale_rows * At(params.scale.row);
  rows.offset.at[r] = row / Chunk::scale_rows * At(params.offset.row);
}

}  // namespace moe_metal
