// Checked Metal pointers, kernel registration and the callbacks of instrumented code.
// Compiled into every shader library, with clang and -fsanitize=thread,bounds,...: those sanitizers only insert
// calls; callbacks.cpp has the functions that they call.
#pragma once

#include "abi.h"
#include "parameters.h"

// clang's thread sanitizer ignores accesses in other address spaces, which are ordinary memory on the CPU. The
// simulator's own accesses use QUIET pointers, so only the shader's accesses are reported.
#define QUIET __attribute__((address_space(1)))
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined", "bounds")))
#define MSL_INLINE __attribute__((always_inline)) MSL_UNCHECKED inline
#define MSL_SITE \
  ::msl::Site { uint64_t(__builtin_LINE()) << 32 | uint32_t(__builtin_COLUMN()) }

namespace msl {

namespace abi = metal_sim::abi;

struct Site {  // a place in the shader's text
  uint64_t value;
};

__attribute__((visibility("hidden"))) inline constinit abi::State state{};
inline abi::KernelInfo* kernels = nullptr;
inline abi::StaticVariable* statics = nullptr;
inline bool measuring_now = false;
inline const void* measured = nullptr;

// The asm keeps the optimizer from seeing through the cast.
template <class T>
MSL_INLINE QUIET T* hush(T* p) {
  uint64_t address;
  __asm__("" : "=r"(address) : "0"(p));
  return (QUIET T*)address;
}
MSL_INLINE const QUIET abi::State& quiet() { return *hush(&state); }
MSL_INLINE const QUIET abi::Thread& thread() { return *hush(quiet().thread); }
MSL_INLINE const QUIET abi::Simdgroup& simdgroup_of(const QUIET abi::Thread& t) { return *hush(t.simdgroup); }

[[noreturn]] __attribute__((noinline, cold)) MSL_UNCHECKED inline void bad_access(uint64_t pointer, uint64_t bytes,
                                                                                  uint64_t alignment) {
  state.bad_access(pointer, bytes, alignment, __builtin_return_address(0));
  __builtin_unreachable();
}
[[noreturn]] __attribute__((noinline, cold)) MSL_UNCHECKED inline void violation(const char* rule,
                                                                                 const char* message) {
  state.violation(rule, message, __builtin_return_address(0));
  __builtin_unreachable();
}

// Set if a function constant without a value is used by the initial value of another constant, when the library loads.
inline const char* unset_while_loading = nullptr;
__attribute__((noinline, cold)) MSL_UNCHECKED inline void unset(const char* message) {
  if (!state.violation) unset_while_loading = message;
  if (state.violation) violation("argument", message);
}

template <class T>
__attribute__((always_inline)) inline T* checked(uint64_t pointer) {
  const QUIET abi::Region& region = quiet().regions[pointer >> abi::tag_shift];
  uint64_t address = pointer & abi::address_mask;
  uint64_t offset = address - region.begin;
  bool outside = int64_t(offset) < 0 || offset + sizeof(T) > region.size;
  if (__builtin_expect(outside || address % alignof(T) != 0, false)) bad_access(pointer, sizeof(T), alignof(T));
  return (T*)address;
}

// Finds the region of the address of a scalar or member: `&x` has lost its tag.
__attribute__((noinline)) MSL_UNCHECKED inline uint64_t tag_address(const volatile void* raw, Space space) {
  uint64_t address = (uint64_t)raw;
  for (uint32_t tag = 1; tag < state.region_count; ++tag)
    if (address - state.regions[tag].begin < state.regions[tag].size) return uint64_t(tag) << abi::tag_shift | address;
  if (space != Space::constant && raw) violation("bounds", "the address of something outside all bound buffers");
  return address;
}

// What must stay in registers, or out of threadgroup memory, says so in simd.h.
template <Space S, class T>
inline constexpr bool may_be_in = true;
#define MSL_MAY_BE_IN "simdgroup matrices are in registers only, atomic_float and atomic_ulong in device memory only"

template <Space S, class T>
class pointer {
  static_assert(may_be_in<S, __remove_cv(T)>, MSL_MAY_BE_IN);

 public:
  using element = T;
  pointer() = default;
  pointer(decltype(nullptr)) : bits_(0) {}
  pointer(T* raw) : bits_(tag_address(raw, S)) {}
  template <class U>
    requires(__is_convertible(U*, T*) && !__is_same(U, T))
  pointer(pointer<S, U> other) : bits_(other.bits()) {}
  template <class U>
    requires(!__is_convertible(U*, T*))
  explicit pointer(pointer<S, U> other) : bits_(other.bits()) {}

  static pointer from_bits(uint64_t bits) {
    pointer p;
    p.bits_ = bits;
    return p;
  }
  uint64_t bits() const { return bits_; }

  template <class U = T>
  U& operator*() const {
    return *checked<U>(bits_);
  }
  template <class U = T>
  U* operator->() const {
    return checked<U>(bits_);
  }
  template <class I, class U = T>
  U& operator[](I i) const {
    return *checked<U>(bits_ + uint64_t(i) * sizeof(U));
  }
  template <class I>
    requires(__is_integral(I))
  friend pointer operator+(pointer p, I i) {
    return from_bits(p.bits_ + uint64_t(i) * sizeof(T));
  }
  template <class I>
    requires(__is_integral(I))
  friend pointer operator+(I i, pointer p) {
    return p + i;
  }
  template <class I>
    requires(__is_integral(I))
  friend pointer operator-(pointer p, I i) {
    return from_bits(p.bits_ - uint64_t(i) * sizeof(T));
  }
  friend ptrdiff_t operator-(pointer a, pointer b) { return ptrdiff_t(a.bits_ - b.bits_) / ptrdiff_t(sizeof(T)); }
  template <class I>
  pointer& operator+=(I i) {
    return *this = *this + i;
  }
  template <class I>
  pointer& operator-=(I i) {
    return *this = *this - i;
  }
  pointer& operator++() { return *this += 1; }
  pointer& operator--() { return *this -= 1; }
  pointer operator++(int) {
    pointer old = *this;
    ++*this;
    return old;
  }
  pointer operator--(int) {
    pointer old = *this;
    --*this;
    return old;
  }
  friend bool operator==(pointer a, pointer b) { return a.bits_ == b.bits_; }
  friend bool operator<(pointer a, pointer b) { return a.bits_ < b.bits_; }
  friend bool operator>(pointer a, pointer b) { return a.bits_ > b.bits_; }
  friend bool operator<=(pointer a, pointer b) { return a.bits_ <= b.bits_; }
  friend bool operator>=(pointer a, pointer b) { return a.bits_ >= b.bits_; }
  explicit operator bool() const { return bits_ != 0; }
  explicit operator uint64_t() const { return bits_; }

 private:
  uint64_t bits_;
};

template <class T>
using device_ptr = pointer<Space::device, T>;
template <class T>
using constant_ptr = pointer<Space::constant, const T>;
template <class T>
using threadgroup_ptr = pointer<Space::threadgroup, T>;

template <class To>
struct reinterpret {
  template <class From>
  static To from(From p) {
    return To(p);
  }
};
template <class To>
struct reinterpret<To*> {
  template <class From>
  static To* from(From* p) {
    return reinterpret_cast<To*>(p);
  }
};
template <class To, class From>
To reinterpret_pointer(From p) {
  return reinterpret<To>::from(p);
}

// A threadgroup array. It is a pointer too, so that it can be passed where `threadgroup T*` is wanted.
template <class A>
class threadgroup_array;
template <class T, size_t N>
class threadgroup_array<T[N]> : public threadgroup_ptr<T> {
 public:
  explicit threadgroup_array(uint64_t bits) : threadgroup_ptr<T>(threadgroup_ptr<T>::from_bits(bits)) {}
};
template <class T, size_t N, size_t M>
class threadgroup_array<T[N][M]> {
 public:
  explicit threadgroup_array(uint64_t bits) : bits_(bits) {}
  template <class I>
  threadgroup_array<T[M]> operator[](I i) const {
    if (uint64_t(i) >= N) violation("bounds", "a row beyond the end of a threadgroup array");
    return threadgroup_array<T[M]>(bits_ + uint64_t(i) * sizeof(T[M]));
  }
  explicit operator threadgroup_ptr<T>() const { return threadgroup_ptr<T>::from_bits(bits_); }

 private:
  uint64_t bits_;
};

// Threadgroup variables declared in a kernel, registered at load time, so that their size is known before a launch.
template <size_t Size, size_t Alignment, class KernelTag, int ordinal>
struct StaticSlot {
  struct Node : abi::StaticVariable {
    Node();
  };
  static Node node;
};
template <class KernelTag>
inline constexpr char identity = 0;
template <size_t Size, size_t Alignment, class KernelTag, int ordinal>
StaticSlot<Size, Alignment, KernelTag, ordinal>::Node::Node()
    : abi::StaticVariable{&identity<KernelTag>, Size, Alignment, ordinal, 0, 0, statics} {
  statics = this;
}
template <size_t Size, size_t Alignment, class KernelTag, int ordinal>
typename StaticSlot<Size, Alignment, KernelTag, ordinal>::Node StaticSlot<Size, Alignment, KernelTag, ordinal>::node;

template <class T, class KernelTag, int ordinal>
decltype(auto) threadgroup_variable() {
  static_assert(__is_trivially_constructible(T),
                "the type of a threadgroup variable has a constructor: nothing calls it");
  static_assert(may_be_in<Space::threadgroup, __remove_all_extents(T)>, MSL_MAY_BE_IN);
  const QUIET abi::StaticVariable* slot =
      hush<abi::StaticVariable>(&StaticSlot<sizeof(T), alignof(T), KernelTag, ordinal>::node);
  uint32_t tag = slot->tag;
  uint64_t bits = uint64_t(tag) << abi::tag_shift | quiet().regions[tag].begin;
  if constexpr (__is_array(T)) {
    return threadgroup_array<T>(bits);
  } else {
    return *(T*)(bits & abi::address_mask);
  }
}
inline bool measuring(const void* kernel) {
  if (__builtin_expect(!*hush(&measuring_now), true)) return false;
  measured = kernel;
  return true;
}

// --- kernels and their arguments

inline Triple triple(const QUIET uint32_t* v) { return {{v[0], v[1], v[2]}}; }

inline Triple builtin_value(Builtin b) {
  const QUIET abi::State& s = quiet();
  const QUIET abi::Thread& t = thread();
  const QUIET uint32_t* full = s.dispatch_threads_per_threadgroup;
  switch (b) {
    case Builtin::thread_position_in_grid: {
      Triple p = triple(t.in_threadgroup);
      for (int i = 0; i < 3; ++i) p.value[i] += s.threadgroup_in_grid[i] * full[i];
      return p;
    }
    case Builtin::threadgroup_position_in_grid:
      return triple(s.threadgroup_in_grid);
    case Builtin::thread_position_in_threadgroup:
      return triple(t.in_threadgroup);
    case Builtin::thread_index_in_threadgroup:
      return {{t.index}};
    case Builtin::threads_per_threadgroup:
      return triple(s.threads_per_threadgroup);
    case Builtin::dispatch_threads_per_threadgroup:
      return triple(full);
    case Builtin::threadgroups_per_grid:
      return triple(s.threadgroups_per_grid);
    case Builtin::threads_per_grid:
      return triple(s.threads_per_grid);
    case Builtin::thread_index_in_simdgroup:
      return {{t.lane}};
    case Builtin::simdgroup_index_in_threadgroup:
      return {{t.simdgroup_index}};
    case Builtin::simdgroups_per_threadgroup:
      return {{(s.thread_count + 31) / 32}};
    case Builtin::dispatch_simdgroups_per_threadgroup:
      return {{(full[0] * full[1] * full[2] + 31) / 32}};
    case Builtin::threads_per_simdgroup:
    case Builtin::thread_execution_width:
      return {{32}};
    case Builtin::thread_index_in_quadgroup:
      return {{t.lane % 4}};
    case Builtin::quadgroup_index_in_threadgroup:
      return {{t.index / 4}};
  }
  __builtin_unreachable();
}

template <Space S, class T>
struct Bind<pointer<S, T>> {
  template <Space declared, uint32_t index>
  static pointer<S, T> from(BufferArgument<declared, index>) {
    constexpr uint64_t first = S == Space::threadgroup ? abi::first_threadgroup_tag : abi::first_buffer_tag;
    return pointer<S, T>::from_bits((first + index) << abi::tag_shift | quiet().regions[first + index].begin);
  }
  template <Space declared, uint32_t index>
  static abi::ParameterInfo info(BufferArgument<declared, index> argument) {
    return {argument.name, uint32_t(declared), index, __is_const(T), 0, sizeof(T), alignof(T)};
  }
};
template <class T>
struct Bind<T&> {
  template <Space declared, uint32_t index>
  static T& from(BufferArgument<declared, index>) {
    constexpr uint64_t first = declared == Space::threadgroup ? abi::first_threadgroup_tag : abi::first_buffer_tag;
    return *checked<T>((first + index) << abi::tag_shift | quiet().regions[first + index].begin);
  }
  template <Space declared, uint32_t index>
  static abi::ParameterInfo info(BufferArgument<declared, index> argument) {
    return {argument.name, uint32_t(declared), index, __is_const(T), 1, sizeof(T), alignof(T)};
  }
};

template <class... P, class... A>
__attribute__((always_inline)) inline void invoke(void (*kernel)(P...), A... arguments) {
  if (__builtin_expect(*hush(&unset_while_loading) != nullptr, false)) unset(*hush(&unset_while_loading));
  kernel(Bind<P>::from(arguments)...);
}
template <class... P, class... A>
uint32_t describe(abi::ParameterInfo* out, void (*kernel)(P...), A... arguments) {
  check_parameters(kernel, arguments...);
  uint32_t count = 0;
  auto one = [&]<class Q>(Q*, auto argument) {
    if constexpr (requires { Q::info(argument); }) out[count++] = Q::info(argument);
  };
  (one((Bind<P>*)nullptr, arguments), ...);
  return count;
}

struct Registration {
  abi::KernelInfo info;
  abi::ParameterInfo parameters[64];
  template <class Describe>
  Registration(const char* name, uint32_t max_threads, void (*entry)(), Describe describe_into) {
    uint32_t count = describe_into(parameters);
    info = {name, entry, count, parameters, max_threads, 0, 0, nullptr, nullptr, kernels};
    kernels = &info;
  }
};

// --- data races and reads of uninitialised memory

struct Now {
  uint32_t epoch, start, dispatch_start;
  bool device;
};

// Whether two accesses by different threads are not ordered by a barrier.
MSL_INLINE bool unordered(uint64_t word, const Now& now, const QUIET abi::Thread& t) {
  uint32_t epoch = abi::word_epoch(word);
  if (now.device && epoch < now.start) return epoch >= now.dispatch_start;
  if (epoch != now.epoch || abi::word_thread(word) == t.index) return false;
  bool same_simdgroup = abi::word_thread(word) / 32 == t.index / 32;
  uint32_t simdgroup_epoch = simdgroup_of(t).epoch;
  return !(same_simdgroup && abi::word_simdgroup_epoch(word) < (simdgroup_epoch & 0x3ffff));
}

MSL_INLINE bool write_conflicts_with_reads(uint64_t word, const Now& now, const QUIET abi::Thread& t) {
  if (word & abi::several_threadgroups) return abi::word_epoch(word) >= now.dispatch_start;
  if (unordered(word, now, t)) return true;
  if (abi::word_epoch(word) != now.epoch) return false;
  if (word & abi::several_simdgroups) return true;
  uint32_t simdgroup_epoch = simdgroup_of(t).epoch & 0x3ffff;
  return (word & abi::several_lanes) && abi::word_simdgroup_epoch(word) == simdgroup_epoch;
}

MSL_INLINE uint64_t add_reader(uint64_t old, uint64_t me, const Now& now) {
  uint32_t epoch = abi::word_epoch(old);
  if (now.device && epoch >= now.dispatch_start) {
    if (old & abi::several_threadgroups) return old;
    if (epoch < now.start) return me | abi::several_threadgroups;
  }
  if (epoch != now.epoch) return me;
  if (old & abi::several_simdgroups) return old;
  if (abi::word_thread(old) / 32 != abi::word_thread(me) / 32) return me | abi::several_simdgroups;
  if (abi::word_simdgroup_epoch(old) < abi::word_simdgroup_epoch(me)) return me;
  return abi::word_thread(old) == abi::word_thread(me) ? old : old | abi::several_lanes;
}

[[noreturn]] __attribute__((noinline, cold)) MSL_UNCHECKED inline void bad_sharing(abi::Race race, uint64_t address,
                                                                                   uint64_t other, bool device,
                                                                                   const void* where) {
  state.bad_sharing(race, address, other, device, where);
  __builtin_unreachable();
}

template <bool is_write, bool is_atomic>
MSL_INLINE void touch(QUIET abi::Cell& cell, uint64_t address, uint64_t me, const Now& now, const void* where) {
  const QUIET abi::Thread& t = thread();
  if (!now.device && !is_write && abi::word_epoch(cell.write) < now.start)
    bad_sharing(abi::Race::uninitialized, address, 0, now.device, where);
  bool both_atomic = is_atomic && (cell.write & abi::atomic);
  if (cell.write >> 4 != me >> 4 && !both_atomic && unordered(cell.write, now, t))
    bad_sharing(is_write ? abi::Race::write_after_write : abi::Race::read_after_write, address, cell.write, now.device,
                where);
  if constexpr (is_write) {
    if (cell.read && write_conflicts_with_reads(cell.read, now, t))
      bad_sharing(abi::Race::write_after_read, address, cell.read, now.device, where);
    cell.write = me | (is_atomic ? abi::atomic : 0);
  } else if constexpr (!is_atomic) {
    if (cell.read != me) cell.read = add_reader(cell.read, me, now);
  }
}

template <bool is_write, bool is_atomic>
__attribute__((noinline)) MSL_UNCHECKED void touch_device(uint64_t address, uint64_t bytes, const void* where) {
  const QUIET abi::State& s = quiet();
  for (uint32_t i = 0; i < s.shadowed_count; ++i) {
    uint64_t offset = address - s.shadowed[i].begin;
    if (offset >= s.shadowed[i].size) continue;
    Now now{s.device_epoch, s.device_start, s.device_dispatch_start, true};
    const QUIET abi::Thread& t = thread();
    uint64_t me = abi::access_word(now.epoch, simdgroup_of(t).epoch, t.index);
    uint32_t shift = s.shadowed[i].granule_shift;
    auto* cells = hush(s.shadowed[i].cells);
    for (uint64_t c = offset >> shift; c <= (offset + bytes - 1) >> shift; ++c)
      touch<is_write, is_atomic>(cells[c], address, me, now, where);
    return;
  }
}

template <bool is_write, bool is_atomic>
MSL_INLINE void accessed(uint64_t address, uint64_t bytes, const void* where) {
  const QUIET abi::State& s = quiet();
  if (__builtin_expect(s.count_access != nullptr, false)) s.count_access(address, bytes, is_write, is_atomic);
  uint64_t offset = address - s.threadgroup_begin;
  if (offset >= s.threadgroup_size) {
    if (s.shadowed_count) touch_device<is_write, is_atomic>(address, bytes, where);
    return;
  }
  Now now{s.threadgroup_epoch, s.threadgroup_start, s.threadgroup_start, false};
  const QUIET abi::Thread& t = thread();
  uint64_t me = abi::access_word(now.epoch, simdgroup_of(t).epoch, t.index);
  auto* cells = hush(s.threadgroup_cells) + offset;
  for (uint64_t i = 0; i < bytes; ++i) touch<is_write, is_atomic>(cells[i], address, me, now, where);
}

}  // namespace msl

// --- the words that translate.py writes; each back end defines them differently

#define MSL_UNPAREN(...) __VA_ARGS__
#define MSL_KERNEL_BODY \
  struct msl_kernel {}; \
  if (::msl::measuring(&::msl::identity<msl_kernel>)) return;
#define MSL_THREADGROUP(name, ordinal, extents, ...) \
  decltype(auto) name = ::msl::threadgroup_variable<__VA_ARGS__ MSL_UNPAREN extents, msl_kernel, ordinal>()
#define MSL_INSTANTIATE(...) template decltype(__VA_ARGS__) __VA_ARGS__;
#define MSL_BUFFER(space, index, name) \
  ::msl::BufferArgument<::msl::Space::space, index> { name }
#define MSL_BUILTIN(name) \
  ::msl::BuiltinArgument<::msl::Builtin::name> {}
#define MSL_KERNEL(id, host_name, max_threads, arguments, ...)                     \
  static void msl_entry_##id() { ::msl::invoke(&__VA_ARGS__ MSL_MORE arguments); } \
  static const ::msl::Registration msl_registration_##id(                          \
      host_name, max_threads, &msl_entry_##id,                                     \
      [](::metal_sim::abi::ParameterInfo* out) { return ::msl::describe(out, &__VA_ARGS__ MSL_MORE arguments); });
#define MSL_MORE(...) __VA_OPT__(, ) __VA_ARGS__
