// How loops run on all threads: at::parallel_for, and share() on top of it. Both keep to torch.set_num_threads.
//
// The threads are those of PyTorch's own operators: two pools would take the cores from each other, since OpenMP's
// threads spin for a while after a loop.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#ifndef INTRA_OP_PARALLEL
#error "at::parallel_for is a header that runs on one thread without OpenMP: see setup.py for the compiler's flags"
#endif

namespace moe_metal {

// worker(take) on every thread; take() hands out the items 0, 1, ... to whoever asks first, and then `count`.
// So a core slowed by other work delays no one. Which thread does an item changes no bit of its result. A few
// neighbours go to one thread, which may then fetch the next one ahead.
template <class Worker>
void share(int64_t count, Worker&& worker) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  const int64_t run = std::clamp<int64_t>(count / (std::max<int64_t>(threads, 1) * 16), 1, 8);
  std::atomic<int64_t> taken = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t next = 0, end = 0;
    worker([&] {
      if (next == end) next = taken.fetch_add(run, std::memory_order_relaxed), end = next + run;
      return std::min(next++, count);
    });
  });
}

}  // namespace moe_metal
