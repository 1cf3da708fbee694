// The CPU ops' allocator alone, for the thread sanitizer: threads that take, fill, hand over and give up large tensors,
// beside forks whose children do the same. tools/sanitize.py builds and runs it.
#include <ATen/Functions.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "kept_memory.h"

namespace {

constexpr int kThreads = 4, kTurns = 12, kForks = 6;
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

// -> how many children ended well
int forks() {
  int good = 0;
  for (int turn = 0; turn < kForks; ++turn) {
    const pid_t child = fork();
    if (child == 0) {
      const at::Tensor mine = taken(5);
      fill(mine, 7);
      _exit(holds(mine, 7) ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    good += status == 0;
  }
  return good;
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int me = 0; me < kThreads; ++me) threads.emplace_back(work, me);
  const int good = forks();
  for (auto& thread : threads) thread.join();
  for (auto& shelf : shelves) shelf.tensor.reset();
  std::printf("%d threads of %d turns, %d of %d forks well\n", kThreads, kTurns, good, kForks);
  return good == kForks ? 0 : 1;
}
