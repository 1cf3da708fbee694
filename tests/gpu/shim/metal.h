// The translated shaders' words for NVIDIA GPUs: a warp is a simdgroup, shared memory is threadgroup memory, pointers
// are not checked. clang compiles it for NVPTX as C++, with the types and maths of the simulator. See
// ../../metal_sim/engine/translate.py.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "parameters.h"

#define MSL_UNCHECKED
#define QUIET

// Functions of NVIDIA's libdevice; clang's builtins would call functions that GPUs do not have.
extern "C" {
float __nv_expf(float);
float __nv_exp2f(float);
float __nv_logf(float);
float __nv_log2f(float);
float __nv_log10f(float);
float __nv_tanhf(float);
float __nv_powf(float, float);
double __nv_pow(double, double);
}
#define __builtin_expf __nv_expf
#define __builtin_exp2f __nv_exp2f
#define __builtin_logf __nv_logf
#define __builtin_log2f __nv_log2f
#define __builtin_log10f __nv_log10f
#define __builtin_tanhf __nv_tanhf
#define __builtin_powf __nv_powf
#define __builtin_pow __nv_pow

namespace msl {

[[noreturn]] inline void violation(const char*, const char*) { __builtin_trap(); }
inline void unset(const char*) { __builtin_trap(); }

template <class T>
using device_ptr = T*;
template <class T>
using constant_ptr = const T*;
template <class T>
using threadgroup_ptr = T*;
template <class To, class From>
To reinterpret_pointer(From from) {
  return reinterpret_cast<To>(from);
}

// In shaders that multiply matrices (see ptx.py), lanes are renumbered so that the elements of Metal's matrices are in
// the registers where the tensor cores need them (warp.h).
#ifdef MSL_MATRICES
constexpr uint32_t numbered(uint32_t x) { return (x & ~14u) | (x & 12) >> 1 | (x & 2) << 2; }
constexpr uint32_t place_of(uint32_t lane) { return (lane & ~14u) | (lane & 6) << 1 | (lane & 8) >> 2; }
#else
constexpr uint32_t numbered(uint32_t x) { return x; }
constexpr uint32_t place_of(uint32_t lane) { return lane; }
#endif
inline uint32_t thread_index() { return numbered(__nvvm_read_ptx_sreg_tid_x()); }

// Grids here are one or two threadgroups wide and threadgroups are one row of threads, as launch.mm makes them.
inline Triple builtin_value(Builtin b) {
  const uint32_t x = thread_index(), threads = __nvvm_read_ptx_sreg_ntid_x();
  const uint32_t group[2] = {uint32_t(__nvvm_read_ptx_sreg_ctaid_x()), uint32_t(__nvvm_read_ptx_sreg_ctaid_y())};
  const uint32_t groups[2] = {uint32_t(__nvvm_read_ptx_sreg_nctaid_x()), uint32_t(__nvvm_read_ptx_sreg_nctaid_y())};
  switch (b) {
    case Builtin::thread_position_in_grid:
      return {{group[0] * threads + x, group[1], 0}};
    case Builtin::threadgroup_position_in_grid:
      return {{group[0], group[1], 0}};
    case Builtin::thread_position_in_threadgroup:
      return {{x, 0, 0}};
    case Builtin::thread_index_in_threadgroup:
      return {{x}};
    case Builtin::threads_per_threadgroup:
    case Builtin::dispatch_threads_per_threadgroup:
      return {{threads, 1, 1}};
    case Builtin::threadgroups_per_grid:
      return {{groups[0], groups[1], 1}};
    case Builtin::threads_per_grid:
      return {{groups[0] * threads, groups[1], 1}};
    case Builtin::thread_index_in_simdgroup:
      return {{x % 32}};
    case Builtin::simdgroup_index_in_threadgroup:
      return {{x / 32}};
    case Builtin::simdgroups_per_threadgroup:
    case Builtin::dispatch_simdgroups_per_threadgroup:
      return {{threads / 32}};
    case Builtin::threads_per_simdgroup:
    case Builtin::thread_execution_width:
      return {{32}};
    case Builtin::thread_index_in_quadgroup:
      return {{x % 4}};
    case Builtin::quadgroup_index_in_threadgroup:
      return {{x / 4}};
  }
  __builtin_unreachable();
}

// The arguments of a launch: buffers by index, and the bytes of setBytes, with 640 bytes for each index modulo 4.
struct Arguments {
  void* buffers[31];
  alignas(16) unsigned char bytes[4][640];
};

// The kernel's only [[threadgroup(n)]] parameter; the launch sets its size.
extern __attribute__((address_space(3))) unsigned char dynamic_memory[];

// The cast through the global address space lets the compiler know that this is global memory.
template <class T>
struct Bind<T*> {
  template <Space S, uint32_t index>
  static T* from(BufferArgument<S, index>, const Arguments& arguments) {
    if constexpr (S == Space::threadgroup) return (T*)(unsigned char*)dynamic_memory;
    return (T*)(__attribute__((address_space(1))) T*)(arguments.buffers[index]);
  }
};
template <class T>
struct Bind<const T&> {
  template <Space S, uint32_t index>
  static const T& from(BufferArgument<S, index>, const Arguments& arguments) {
    static_assert(sizeof(T) <= 640);
    return *reinterpret_cast<const T*>(arguments.bytes[index % 4]);
  }
};

template <class P, Builtin B>
P bound(BuiltinArgument<B> argument, const Arguments&) {
  return Bind<P>::from(argument);
}
template <class P, Space S, uint32_t index>
decltype(auto) bound(BufferArgument<S, index> argument, const Arguments& arguments) {
  return Bind<P>::from(argument, arguments);
}
template <class... P, class... A>
__attribute__((always_inline)) inline void invoke(void (*kernel)(P...), const Arguments& arguments, A... each) {
  kernel(bound<P>(each, arguments)...);
}

}  // namespace msl

#include "math.h"
// must follow math.h, whose types it uses
#include "warp.h"

// --- the words that translate.py writes

#define MSL_UNPAREN(...) __VA_ARGS__
#define MSL_MORE(...) __VA_OPT__(, ) __VA_ARGS__
#define MSL_KERNEL_BODY
// The array, or for a single variable the variable, in shared memory.
#define MSL_THREADGROUP(name, ordinal, extents, ...)                                                            \
  using name##_type = __VA_ARGS__ MSL_UNPAREN extents;                                                          \
  alignas(16) static                                                                                            \
      __attribute__((address_space(3), loader_uninitialized)) unsigned char name##_memory[sizeof(name##_type)]; \
  auto& name = *(name##_type*)(unsigned char*)name##_memory
#define MSL_INSTANTIATE(...)
#define MSL_BUFFER(space, index, name) \
  ::msl::BufferArgument<::msl::Space::space, index> { name }
#define MSL_BUILTIN(name) \
  ::msl::BuiltinArgument<::msl::Builtin::name> {}
#define MSL_KERNEL(id, host_name, max_threads, arguments, ...)                                     \
  [[clang::nvptx_kernel]] void msl_kernel_##id(::msl::Arguments msl_arguments) __asm__(host_name); \
  [[clang::nvptx_kernel]] void msl_kernel_##id(::msl::Arguments msl_arguments) {                   \
    ::msl::invoke(&__VA_ARGS__, msl_arguments MSL_MORE arguments);                                 \
  }
