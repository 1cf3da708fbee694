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

}  // namespace moe_metal
