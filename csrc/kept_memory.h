// Memory of the CPU ops' tensors.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace moe_metal {

// Large blocks of memory that are used again when their tensors are gone, as PyTorch does on GPUs.
//
// The first write to each page of fresh memory is a page fault, and malloc gives large blocks back to the system, so
// that a large output would pay for its faults at every call. They take longer than its values: norm_add, T = 4096,
// H = 2048, f32, took 1.8 times as long. What waits here for its next use belongs to the system where that is short of
// memory: to offer them costs next to nothing in huge pages, and a fifth of the faults in small ones. malloc's blocks
// may not have huge pages, so these are mapped.
//
// A prefill gains from it where its scratch is large: glibc learns to keep blocks of up to 32 MiB and maps larger ones
// anew at each call. CPU time without this over CPU time with it, in turn, one patched layer of Qwen3-30B-A3B in bf16
// on 2 cores of a Zen 4 (a virtual machine that did other work, too; malloc as glibc sets it up): 512 tokens 0.98 (0.94
// to 1.03 in 10 pairs), 2048 tokens 1.045 (1.01 to 1.08 in 6 pairs), 8192 tokens 1.035 (a single pair). It saves 15,000
// page faults at 2048 tokens and 115,000 at 8192, most of them of `inner`, which experts_by_dots holds as float.
//
// fork() waits until no thread changes the lists, so that the child finds them whole and unlocked.
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
    auto* pytorch = c10::GetCPUAllocator();
    if (bytes < kLarge) return pytorch->allocate(bytes);  // a storage's resize_ may want that
    Block block = take(bytes);
    if (!block.data) block = map(bytes);
    if (block.data == MAP_FAILED) return pytorch->allocate(bytes);  // which says so if there is no memory
    const std::lock_guard lock(mutex_);
    in_use_.emplace(block.data, block.bytes);
    return {block.data, block.data, &give_back, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  KeptMemory() {
    const auto unlock = [] { instance().mutex_.unlock(); };
    pthread_atfork([] { instance().mutex_.lock(); }, unlock, unlock);
  }

  static Block map(size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
#ifdef MADV_HUGEPAGE
    if (data != MAP_FAILED) madvise(data, bytes, MADV_HUGEPAGE);  // one fault for 2 MiB
#endif
    return {data, bytes};
  }

  // The smallest block that waits and is large enough, if it is not twice as large as that; of equals the one that was
  // given back last, which caches may still hold.
  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = waiting_.end();
    for (auto block = waiting_.begin(); block != waiting_.end(); ++block) {
      const bool fits = bytes <= block->bytes && block->bytes / 2 < bytes;
      if (fits && (best == waiting_.end() || block->bytes <= best->bytes)) best = block;
    }
    if (best == waiting_.end()) return {};
    const Block block = *best;
    waiting_.erase(best);
    waiting_bytes_ -= block.bytes;
    return block;
  }

  static void give_back(void* data) { instance().keep(data); }

  void keep(void* data) {
    const Block block = used(data);
    if (block.bytes > kMost) {
      munmap(block.data, block.bytes);
      return;
    }
    // Its pages are the system's if it needs some. Once it waits, another thread may write to it.
    madvise(block.data, block.bytes, MADV_FREE);
    for (const Block& dropped : wait(block)) munmap(dropped.data, dropped.bytes);
  }

  // Ends a block's use.
  Block used(void* data) {
    const std::lock_guard lock(mutex_);
    const auto entry = in_use_.find(data);
    const Block block{data, entry->second};
    in_use_.erase(entry);
    return block;
  }

  // -> the blocks that have waited longest, where that is too much
  std::vector<Block> wait(const Block& block) {
    std::vector<Block> dropped;
    const std::lock_guard lock(mutex_);
    waiting_.push_back(block);
    waiting_bytes_ += block.bytes;
    for (; waiting_bytes_ > kMost; waiting_.pop_front()) {
      waiting_bytes_ -= waiting_.front().bytes;
      dropped.push_back(waiting_.front());
    }
    return dropped;
  }

  std::mutex mutex_;  // held for the lists alone: system calls on large blocks take long
  std::map<void*, size_t> in_use_;
  std::deque<Block> waiting_;  // the longest first
  size_t waiting_bytes_ = 0;
};

// at::empty for the outputs and the scratch of ops.
inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(dtype));
  if (bytes < KeptMemory::kLarge) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &KeptMemory::instance(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

}  // namespace moe_metal
