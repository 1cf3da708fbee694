// The CPU ops' allocator alone, for the thread sanitizer: threads that take, fill, hand over and give up large tensors.
// tools/sanitize.py builds and runs it. Forks beside threads are tests/test_memory.py's: the child of a program under
// the thread sanitizer may hang in the sanitizer itself.
#include <ATen/Functions.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "kept_memory.h"

namespace {

constexpr int kThreads = 4, kTurns = 12;
constexpr std::array<int64_t, 4> kMiB = {4, 5, 9, 530};  // the last is more than may wait

at::Tensor taken(int64_t mib) { return moe_metal::empty({mib << 18}, at::TensorOptions().dtype(at::kFloat)); }

// Some of each page.
void fill(const at::Tensor& tensor, float value) {
  auto* data = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); i += 4096) data[i] = value;
}

bool holds(const at::Tensor& tensor, float value) {
  const auto* data = tensor.const_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); i += 4096) {
    if (data[i] != value) return false;
  }
  return true;
}

// A shelf on which a tensor waits until another thread takes it, and gives it up there.
struct Shelf {
  std::mutex mutex;
  at::Tensor tensor;
  void swap(at::Tensor& other) {
    const std::lock_guard lock(mutex);
    std::swap(tensor, other);
  }
};

std::array<Shelf, kThreads> shelves;

void work(int me) {
  for (int turn = 0; turn < kTurns; ++turn) {
    const size_t size = turn == me ? 3 : (me + turn) % 3;
    at::Tensor mine = taken(kMiB[size]);
    fill(mine, static_cast<float>(turn));
    if (!holds(mine, static_cast<float>(turn))) std::abort();
    shelves[(me + turn) % kThreads].swap(mine);
  }
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int me = 0; me < kThreads; ++me) threads.emplace_back(work, me);
  for (auto& thread : threads) thread.join();
  for (auto& shelf : shelves) shelf.tensor.reset();
  std::printf("%d threads of %d turns\n", kThreads, kTurns);
}
