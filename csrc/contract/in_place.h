// Tensors that an op writes in place.
#pragma once
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "arguments.h"

namespace moe_metal {

// The kernel writes `work`; done() copies it back if the strides of `target` forced a copy.
struct InPlace {
  Tensor target, work;
  void done() const {
    if (!work.is_same(target)) target.copy_(work);
  }
};

// Whether two elements share memory. PyTorch's own check does not decide this for most tensors that are not dense.
inline bool overlaps_itself(const Tensor& tensor) {
  const auto overlap = at::has_internal_overlap(tensor);
  if (overlap != at::MemOverlap::TooHard) return overlap == at::MemOverlap::Yes;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) steps.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(steps.begin(), steps.end());
  int64_t span = 0;  // distance from the first element to the last, in the dimensions so far
  const bool nested = std::all_of(steps.begin(), steps.end(), [&](const auto& step) {
    const bool beyond = step.first > span;
    span += step.first * (step.second - 1);
    return beyond;
  });
  if (nested) return false;
  // Rare, since slices and transposed tensors are nested.
  std::vector<int64_t> offsets = {0};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const size_t before = offsets.size();
    for (int64_t i = 1; i < tensor.size(d); ++i) {
      for (size_t j = 0; j < before; ++j) offsets.push_back(offsets[j] + i * tensor.stride(d));
    }
  }
  std::sort(offsets.begin(), offsets.end());
  return std::adjacent_find(offsets.begin(), offsets.end()) != offsets.end();
}

inline void check_own_memory(const Arguments& args, const char* name, const Tensor& target) {
  TORCH_CHECK(!overlaps_itself(target), args.prefix(name),
              "expected a tensor whose elements have memory of their own, got one in which some share theirs; pass ",
              name, ".clone()");
}

inline void check_apart(const Arguments& args, const char* name, const Tensor& target, const Tensor& other) {
  const auto overlap = at::get_overlap_status(target, other);
  TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial, args.prefix(name),
              "expected memory that no other argument uses, got a tensor that overlaps one");
}

inline InPlace in_place(const Arguments& args, const Tensor& target, std::initializer_list<const Tensor*> inputs) {
  check_own_memory(args, "residual", target);
  for (const Tensor* input : inputs) check_apart(args, "residual", target, *input);
  if (!target.is_contiguous()) GivenOutputs::note_copy();
  return {target, target.contiguous()};
}

}  // namespace moe_metal
