// Parallel loops: at::parallel_for, and parallel_work_queue() on top of it. Both respect torch.set_num_threads.
//
// The threads are PyTorch's own: two pools would compete for the cores, since OpenMP's threads spin for a while after a
// loop.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#ifndef INTRA_OP_PARALLEL
#error "at::parallel_for is a header that runs on one thread without OpenMP: see setup.py for the compiler's flags"
#endif

namespace moe_metal {

// Calls worker(next_item) on every thread. next_item() returns the next of the items 0, 1, ..., then `count`. Items are
// claimed dynamically, so a core that is slowed down by other work does not delay the rest. Results do not depend on
// the thread that computes an item. A thread claims a few neighbouring items at a time, so that it can prefetch the
// next one.
template <class Worker>
void parallel_work_queue(int64_t count, Worker&& worker) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  const int64_t at_once = std::clamp<int64_t>(count / (std::max<int64_t>(threads, 1) * 16), 1, 8);
  std::atomic<int64_t> taken = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t next = 0, end = 0;
    worker([&] {
      if (next == end) next = taken.fetch_add(at_once, std::memory_order_relaxed), end = next + at_once;
      return std::min(next++, count);
    });
  });
}

// Calls work(item, next) for the items that next_item() returns. `next` is the item that follows on this thread, to be
// prefetched, or `count`.
template <class NextItem, class Work>
void for_each_item(NextItem& next_item, int64_t count, Work&& work) {
  for (int64_t item = next_item(), next; item < count; item = next) {
    next = next_item();
    work(item, next);
  }
}

}  // namespace moe_metal
