// The attributes of kernel parameters, shared by all back ends.
#pragma once

#include <stdint.h>

namespace msl {

enum class Space { device, constant, threadgroup };

enum class Builtin {
  thread_position_in_grid,
  threadgroup_position_in_grid,
  thread_position_in_threadgroup,
  thread_index_in_threadgroup,
  threads_per_threadgroup,
  dispatch_threads_per_threadgroup,
  threadgroups_per_grid,
  threads_per_grid,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  dispatch_simdgroups_per_threadgroup,
  threads_per_simdgroup,
  thread_execution_width,
  thread_index_in_quadgroup,
  quadgroup_index_in_threadgroup,
};

struct Triple {
  uint32_t value[3];
};

constexpr bool is_triple(Builtin b) {
  return b == Builtin::thread_position_in_grid || b == Builtin::threadgroup_position_in_grid ||
         b == Builtin::thread_position_in_threadgroup || b == Builtin::threads_per_threadgroup ||
         b == Builtin::dispatch_threads_per_threadgroup || b == Builtin::threadgroups_per_grid ||
         b == Builtin::threads_per_grid;
}

template <Space S, uint32_t index>
struct BufferArgument {
  static_assert(index <= 30, "the index of a [[buffer(n)]] or [[threadgroup(n)]] must be 0 to 30");
  static constexpr bool is_position = false;
  static constexpr int slot = int(index) + (S == Space::threadgroup ? 31 : 0);
  const char* name;
};
template <Builtin B>
struct BuiltinArgument {
  static constexpr bool is_position = is_triple(B);
  static constexpr int slot = -1;  // none
};

// Checks all parameters of a kernel together, for every back end; defined in types.h.
template <class... P, class... A>
constexpr void check_parameters(void (*)(P...), A...);

template <class P>
struct Bind;  // how a kernel parameter of type P takes its argument; scalars and vectors are in metal.h

}  // namespace msl
