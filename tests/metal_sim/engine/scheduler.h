// Runs the threads of one threadgroup as fibers on the calling host thread.
#pragma once

#include <cstdint>
#include <string>

#include "engine.h"
#include "shim/abi.h"

namespace metal_sim {

// The reason why a threadgroup was aborted. `where` is an address in the shader's code, `line` a source line or 0.
struct Failure {
  std::string rule;
  std::string message;
  const void* where = nullptr;
  uint32_t line = 0;
};

// A small generator that gives the same sequence on every machine.
struct Random {
  uint64_t state;
  uint64_t operator()() {
    state += 0x9e3779b97f4a7c15;
    uint64_t z = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
};

// Signal handlers and the time limit while kernels run; one per run of a dispatch.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;
  void allow(double seconds);  // of CPU time from now on
};

// The stacks of all threads of a threadgroup, which contain their local variables.
inline constexpr size_t stack_bytes = 128 << 10, guard_bytes = 16 << 10;
inline constexpr size_t thread_memory_bytes = (stack_bytes + guard_bytes) * max_threads_per_threadgroup;
std::byte* thread_memory();

// The 32 KB of threadgroup memory, and its shadow memory.
std::byte* threadgroup_memory();
abi::Cell* threadgroup_cells();

// Runs the threads given by state.threads_per_threadgroup and thread_count. Returns nullptr, or the reason why it
// stopped. costs: counters of simdgroup and threadgroup operations, or nullptr.
const Failure* run_threadgroup(abi::State& state, void (*entry)(), Order::Kind order, Random& random, Costs* costs);

// Called on a fiber: aborts the whole threadgroup.
[[noreturn]] void fail(Failure failure);

}  // namespace metal_sim
