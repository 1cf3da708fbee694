// Memory of large outputs.
#pragma once
#include <ATen/core/Tensor.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace moe_metal {

// The first write to each page of a fresh output is a page fault, and in pages of 4 KiB the faults of a large output
// take longer than its values. Linux gives huge pages to whoever asks; where it does not, nothing changes.
inline void ask_for_huge_pages(const at::Tensor& output) {
#ifdef __linux__
  constexpr size_t kWorthAsking = size_t{4} << 20;
  if (output.nbytes() < kWorthAsking) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(output.mutable_data_ptr()), end = begin + output.nbytes();
  const auto first = (begin + page - 1) / page * page, last = end / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
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
