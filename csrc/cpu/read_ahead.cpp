#include "cpu/read_ahead.h"

#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace moe_metal {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The storages of such weights. A weak pointer keeps the address from being used again.
struct Storages {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> known;
  std::atomic<bool> any = false;  // the only cost of all other programs
};

Storages& storages() {
  static auto& all = *new Storages;
  return all;
}

bool is_known(const Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  std::lock_guard lock(storages().mutex);
  return storages().known.count(tensor.storage().unsafeGetStorageImpl()) > 0;
}

void will_need(const char* begin, int64_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
  madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(begin) + bytes - first, MADV_WILLNEED);
}

// Contiguous rows of each expert; gate and up may be apart.
void read_weight(const Weight& weight, const std::vector<int64_t>& experts) {
  if (weight.format->is_dense() || !is_known(weight.data)) return;
  const auto* data = static_cast<const char*>(weight.data.const_data_ptr());
  const bool apart = weight.half < weight.rows;
  const int64_t rows = apart ? weight.half : weight.rows;
  for (const int64_t expert : experts) {
    will_need(data + weight.row_start(expert, 0), rows * weight.row);
    if (apart) will_need(data + weight.row_start(expert, rows), (weight.rows - rows) * weight.row);
  }
}

// Remembers the storage of a weight whose experts are read ahead from now on.
void add(const Tensor& data) {
  std::lock_guard lock(storages().mutex);
  std::erase_if(storages().known, [](const auto& each) { return each.second.expired(); });
  const auto storage = data.storage().getWeakStorageImpl();
  storages().known.insert_or_assign(data.storage().unsafeGetStorageImpl(), storage);
  storages().any = true;
}

}  // namespace

void read_ahead(const Experts& call, const std::vector<int64_t>& experts) {
  if (!storages().any.load(std::memory_order_relaxed)) return;
  read_weight(call.gate_up, experts);
  read_weight(call.down, experts);
}

TORCH_LIBRARY_FRAGMENT(moe_metal, m) { m.def("_read_experts_ahead(Tensor data) -> ()", &add); }

}  // namespace moe_metal
