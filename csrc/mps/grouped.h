// PyTorch's own grouped matrix product on mps, aten::_grouped_mm, which exists from torch 2.15 on. It uses the GPU's
// matrix units if macOS allows it. Only grouped.mm uses the op.
#pragma once
#include "contract.h"

namespace moe_metal {

// Whether the op accepts this weight without a copy: dense, 16 bits, one matrix per expert, with strides and an offset
// that are multiples of 16 bytes. False if this torch has no such kernel for mps.
bool has_grouped_product(const Weight& weight);

// out[i] = x[i] * weight[e]^T in the activations' dtype for rows ends[e - 1] <= i < ends[e], where ends[-1] is 0. Rows
// from the last end on are undefined. x [rows, columns] is contiguous, ends [E] is int32. The host does not wait for
// the GPU.
Tensor grouped_product(const Tensor& x, const Weight& weight, const Tensor& ends);

}  // namespace moe_metal
