// The rows of weights of a threadgroup, up to 64, for lanes across the rows.
#pragma once
#include "weights.h"

namespace moe_metal {

// Rows are numbered by their order in memory. `jump` may be negative (if I is small); as unsigned it wraps around.
struct RowTile {
  uint first;               // the matrix row of row 0
  uint jump;                // added from row 32 on
  uint shift, mask, limit;  // row j exists if (j >> shift & mask) < limit

  bool has(uint j) const thread { return (j >> shift & mask) < limit; }
  uint number(uint j) const thread { return first + j + (j < kColumnInner ? 0 : jump); }
};

// The rows of a matrix from `first` on; the matrix has `rows`.
inline RowTile plain_tile(uint first, uint rows) {
  RowTile tile;
  tile.first = first;
  tile.jump = 0;
  tile.shift = 0;
  tile.mask = kColumnRows - 1;
  tile.limit = rows - first;
  return tile;
}

// A pointer to column c of row j of the tile.
template <typename T>
device const T* element(Weights<T> weights, constant WeightParams& params, thread const RowTile& rows, uint j, uint c) {
  return weights.data + rows.number(j) * params.row + c * params.column;
}

}  // namespace moe_metal
