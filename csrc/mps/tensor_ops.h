// Our own kernels for the matrix units of M5 and newer GPUs (shaders/tensor_ops.metal). They need macOS 26.3, and have
// never run on a Mac, so they are off until the check at first use or `tune` finds them correct (tuning.h).
#pragma once
#include "mps/weights.h"

namespace moe_metal {

// Whether the kernels for tiles of this size (a tile_size) compile here, and support x and the weight.
bool has_tensor_product(const Tensor& x, const Weight& weight, int size);

// Tiles of 16 << size rows: the first `count` entries of a list by experts_sort. If `list` is undefined, all rows have
// the same weight.
struct RowTiles {
  Tensor list = {};
  int64_t count = 0;
  int size = 0;
};

// output[i] = weight[e] * x[i] + bias for the rows i of expert e's tiles; other rows are not written. x [rows, columns]
// and output [rows, weight.rows] are contiguous and have the same dtype.
void tensor_product(const Tensor& x, const Weight& weight, const Tensor& bias, const RowTiles& tiles,
                    const Tensor& output);

}  // namespace moe_metal
