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

// The same for an argument that is the first one, that is written, or whose elements are larger than an activation: if
// it is absent it needs an aligned buffer that no other argument has. That is number `index` of a few small ones, which
// are neither read nor written.
inline Tensor or_spare(const Tensor& tensor, int index) {
  if (has_memory(tensor) || (tensor.defined() && tensor.is_meta())) return tensor;
  static const auto& spares = *new std::array<Tensor, 6>([] {
    const Tensor memory = at::empty({6, kVectorWidth}, at::TensorOptions(at::kMPS).dtype(at::kFloat));
    return std::array<Tensor, 6>{memory[0], memory[1], memory[2], memory[3], memory[4], memory[5]};
  }());
  return spares[index];
}

}  // namespace moe_metal
