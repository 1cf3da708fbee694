// Up to 64 rows of weights that a threadgroup works on.
#pragma once
#include "weights.h"

namespace moe_metal {

// Rows are numbered as they lie in memory. The jump, which is below 0 where I is small, wraps around to the right row.
struct RowTile {
  uint first;               // the number of row 0 in the matrix
  uint jump;                // added from row 32 on
  uint shift, mask, limit;  // row j exists when (j >> shift & mask) < limit

  bool has(uint j) const thread { return (j >> shift & mask) < limit; }
  uint number(uint j) const thread { return first + j + (j < kColumnInner ? 0 : jump); }
};

// The next rows of a matrix.
inline RowTile plain_tile(uint first, uint rows) {
  RowTile tile;
  tile.first = first;
  tile.jump = 0;
  tile.shift = 0;
  tile.mask = kColumnRows - 1;
  tile.limit = rows - first;
  return tile;
}

// Element (j, c) of the rows.
template <typename T>
device const T* element(Weights<T> weights, constant WeightParams& params, thread const RowTile& rows, uint j, uint c) {
  return weights.data + rows.number(j) * params.row + c * params.column;
}

}  // namespace moe_metal
