// PyTorch's own product of rows in groups on mps, aten::_grouped_mm, which torch has kernels for from 2.15 on. They use
// the GPU's matrix units where macOS lets them. grouped.mm is the only file that knows the op.
#pragma once
#include "contract.h"

namespace moe_metal {

// Whether the op takes this weight without a copy: dense, 16 bits, one matrix for each expert, with strides and an
// offset of whole pieces of 16 bytes. False where this torch has no such kernel for mps.
bool has_grouped_product(const Weight& weight);

// out[i] = x[i] * weight[e]^T in the activations' dtype for rows ends[e - 1] <= i < ends[e], from 0 on; those from the
// last end on are undefined. x [rows, columns] is contiguous, ends [E] is int32. The host does not wait for the GPU.
Tensor grouped_product(const Tensor& x, const Weight& weight, const Tensor& ends);

}  // namespace moe_metal
