#include "mps/tuning.h"

#include <atomic>

namespace moe_metal {
namespace {

std::atomic<const Tuning*> current = new Tuning;

}  // namespace

const Tuning& tuning() { return *current.load(std::memory_order_acquire); }
void set_tuning(const Tuning& tuning) { current.store(new Tuning(tuning), std::memory_order_release); }

}  // namespace moe_metal
