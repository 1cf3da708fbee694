// Shared by the hosts of linear_attention_ and short_conv_: strides, and buffers for absent tensors.
#pragma once
#include <ATen/ops/empty.h>

#include "mps/launch.h"

namespace moe_metal {

inline RowStrides row_strides(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto of = [&](int d) { return static_cast<uint64_t>(tensor.stride(d)); };
  return {of(0), of(1), tensor.dim() == 3 ? of(2) : 0};
}

// A tensor without elements has no memory.
inline bool has_memory(const Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }

// An argument that is read. launch() binds the first argument in place of an absent one.
inline Tensor read(const Tensor& tensor) { return has_memory(tensor) ? tensor : Tensor(); }

// An argument that is written, or the first one. If it is absent it needs a buffer that no other argument has: that
// number `index` of a few that are never written.
inline Tensor written(const Tensor& tensor, int index) {
  if (has_memory(tensor) || (tensor.defined() && tensor.is_meta())) return tensor;
  static const auto& spares = *new std::array<Tensor, 5>([] {
    const Tensor memory = at::empty({5, kVectorWidth}, at::TensorOptions(at::kMPS).dtype(at::kFloat));
    return std::array<Tensor, 5>{memory[0], memory[1], memory[2], memory[3], memory[4]};
  }());
  return spares[index];
}

}  // namespace moe_metal
