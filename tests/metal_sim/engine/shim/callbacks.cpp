// What every shader library has: the functions that instrumented code calls, and what the engine looks up. Compiled
// once, with the flags of the shaders, and linked to each of them.
#include "runtime.h"

namespace msl {

// Assigns an offset to every threadgroup variable. Called once, after the static constructors.
MSL_UNCHECKED static void lay_out_statics() {
  abi::Thread no_thread{};
  state.thread = &no_thread;
  for (abi::Region& region : state.regions) region = {0, INT64_MAX};
  for (abi::KernelInfo* k = kernels; k; k = k->next) {
    measuring_now = true;
    measured = nullptr;
    k->entry();
    measuring_now = false;
    k->identity = measured;
    k->statics = statics;
    for (abi::StaticVariable* v = statics; v; v = v->next) {
      if (v->kernel != measured) continue;
      v->offset = (k->static_bytes + v->alignment - 1) / v->alignment * v->alignment;
      k->static_bytes = v->offset + v->size;
      v->tag = abi::first_static_tag + k->static_count++;
    }
  }
}

}  // namespace msl

#define MSL_CALLBACK extern "C" __attribute__((visibility("hidden"))) MSL_UNCHECKED
#define MSL_ACCESS(bytes)                                                         \
  MSL_CALLBACK void __tsan_read##bytes(void* p) {                                 \
    msl::accessed<false, false>((uint64_t)p, bytes, __builtin_return_address(0)); \
  }                                                                               \
  MSL_CALLBACK void __tsan_write##bytes(void* p) {                                \
    msl::accessed<true, false>((uint64_t)p, bytes, __builtin_return_address(0));  \
  }                                                                               \
  MSL_CALLBACK void __tsan_unaligned_read##bytes(void* p) {                       \
    msl::accessed<false, false>((uint64_t)p, bytes, __builtin_return_address(0)); \
  }                                                                               \
  MSL_CALLBACK void __tsan_unaligned_write##bytes(void* p) {                      \
    msl::accessed<true, false>((uint64_t)p, bytes, __builtin_return_address(0));  \
  }
MSL_ACCESS(1)
MSL_ACCESS(2)
MSL_ACCESS(4)
MSL_ACCESS(8)
MSL_ACCESS(16)
#undef MSL_ACCESS
MSL_CALLBACK void __tsan_init() {}
MSL_CALLBACK void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  if (!bytes) return to;
  msl::accessed<false, false>((uint64_t)from, bytes, __builtin_return_address(0));
  msl::accessed<true, false>((uint64_t)to, bytes, __builtin_return_address(0));
  return __builtin_memmove(to, from, bytes);
}
MSL_CALLBACK void* __tsan_memmove(void* to, const void* from, size_t bytes) { return __tsan_memcpy(to, from, bytes); }
MSL_CALLBACK void* __tsan_memset(void* to, int value, size_t bytes) {
  if (bytes) msl::accessed<true, false>((uint64_t)to, bytes, __builtin_return_address(0));
  return __builtin_memset(to, value, bytes);
}

// Handlers of the bounds and arithmetic sanitizers.
#define MSL_STOP(handler, rule, message)                                                \
  extern "C" __attribute__((visibility("hidden"), cold)) MSL_UNCHECKED void handler() { \
    msl::state.violation(rule, message, __builtin_return_address(0));                   \
  }
MSL_STOP(__ubsan_handle_out_of_bounds_abort, "stack", "index outside an array in thread or constant space")
MSL_STOP(__ubsan_handle_add_overflow_abort, "arithmetic", "signed addition overflows")
MSL_STOP(__ubsan_handle_sub_overflow_abort, "arithmetic", "signed subtraction overflows")
MSL_STOP(__ubsan_handle_mul_overflow_abort, "arithmetic", "signed multiplication overflows")
MSL_STOP(__ubsan_handle_negate_overflow_abort, "arithmetic", "signed negation overflows")
MSL_STOP(__ubsan_handle_divrem_overflow_abort, "arithmetic", "integer division by zero, or its result overflows")
MSL_STOP(__ubsan_handle_shift_out_of_bounds_abort, "arithmetic", "shift by a negative count or by the width or more")
MSL_STOP(__ubsan_handle_float_cast_overflow_abort, "arithmetic", "conversion of a float the integer cannot hold")
MSL_STOP(__ubsan_handle_missing_return, "arithmetic", "a function ends without returning its value")
#undef MSL_STOP

extern "C" __attribute__((visibility("default"))) metal_sim::abi::State* metal_sim_state() { return &msl::state; }
extern "C" __attribute__((visibility("default"))) metal_sim::abi::KernelInfo* metal_sim_kernels() {
  static const bool once = (msl::lay_out_statics(), true);  // dlopen gives a second user the same library
  (void)once;
  return msl::kernels;
}
