// Memory of the CPU ops' tensors.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace moe_metal {

// Large blocks of PyTorch's CPU memory that are used again when their tensors are gone, as PyTorch does on GPUs.
//
// The first write to each page of fresh memory is a page fault, and malloc gives large blocks back to the system, so
// that a large output would pay for its faults at every call. They take longer than its values: norm_add, T = 4096,
// H = 2048, f32, took 1.7 times as long. What waits here for its next use belongs to Linux where it is short of memory.
class KeptMemory final : public c10::Allocator {
 public:
  static constexpr size_t kLarge = size_t{4} << 20;   // bytes of a tensor that is worth it
  static constexpr size_t kMost = size_t{512} << 20;  // bytes that wait here at most

  // Never destroyed: tensors may outlive every static object.
  static KeptMemory& instance() {
    static auto* memory = new KeptMemory;
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLarge) return c10::GetCPUAllocator()->allocate(bytes);  // a storage's resize_ may want that
    Block block = take(bytes);
    if (!block.memory) {
      block = {c10::GetCPUAllocator()->allocate(bytes), bytes};
#ifdef __linux__
      advise(block, MADV_HUGEPAGE);  // one fault for 2 MiB
#endif
    }
    void* data = block.memory.get();
    const std::lock_guard lock(mutex_);
    in_use_.emplace(data, std::move(block));
    return {data, data, &give_back, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

 private:
  struct Block {
    c10::DataPtr memory;
    size_t bytes = 0;
  };

  // The smallest block that waits and is large enough, if it is not twice as large as that.
  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = waiting_.end();
    for (auto block = waiting_.begin(); block != waiting_.end(); ++block) {
      const bool fits = bytes <= block->bytes && block->bytes / 2 < bytes;
      if (fits && (best == waiting_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == waiting_.end()) return {};
    Block block = std::move(*best);
    waiting_.erase(best);
    waiting_bytes_ -= block.bytes;
    return block;
  }

  static void give_back(void* data) { instance().keep(data); }

  void keep(void* data) {
    std::vector<Block> freed;  // after the lock
    const std::lock_guard lock(mutex_);
    const auto used = in_use_.find(data);
#if defined(__linux__) && defined(MADV_FREE)
    advise(used->second, MADV_FREE);
#endif
    waiting_bytes_ += used->second.bytes;
    waiting_.push_back(std::move(used->second));
    in_use_.erase(used);
    for (; waiting_bytes_ > kMost; waiting_.pop_front()) {
      waiting_bytes_ -= waiting_.front().bytes;
      freed.push_back(std::move(waiting_.front()));
    }
  }

#ifdef __linux__
  // Of the whole huge pages in the block: a part of one would be split off.
  static void advise(const Block& block, int advice) {
    constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
    const auto begin = reinterpret_cast<uintptr_t>(block.memory.get());
    const auto first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const auto last = (begin + block.bytes) / kHugePage * kHugePage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, advice);
  }
#endif

  std::mutex mutex_;
  std::unordered_map<void*, Block> in_use_;
  std::deque<Block> waiting_;  // the longest first
  size_t waiting_bytes_ = 0;
};

// at::empty for the outputs and the scratch of ops.
inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(dtype));
  if (!options.device().is_cpu() || bytes < KeptMemory::kLarge) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &KeptMemory::instance(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

// Whether stores to rows of n elements had better go past the caches (store_past_caches in vec.h): the output leaves
// them anyway, and its rows keep to the alignment of vectors. residual_norm, T = 4096, H = 2048, f32: 8.3 ms for 10.5.
inline bool past_caches(const at::Tensor& output, int64_t n) {
  constexpr size_t kLargerThanCaches = size_t{8} << 20, kAlignment = 64;
  const auto bytes = n * output.element_size();
  return output.nbytes() >= kLargerThanCaches && bytes % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(output.data_ptr()) % kAlignment == 0;
}

}  // namespace moe_metal
