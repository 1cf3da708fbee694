// Shared by compiled shaders and the engine. A shader library owns one State; the engine fills it for each dispatch.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace metal_sim::abi {

// A Metal pointer is an address with the number of its region in the top 8 bits.
inline constexpr int tag_shift = 56;
inline constexpr uint64_t address_mask = (uint64_t(1) << tag_shift) - 1;
inline constexpr uint32_t first_buffer_tag = 1;        // device and constant buffers by index
inline constexpr uint32_t first_threadgroup_tag = 33;  // [[threadgroup(n)]] by index
inline constexpr uint32_t first_static_tag = 65;       // threadgroup variables of a kernel
inline constexpr uint32_t max_tags = 256;              // tag 0: program-scope constants, not checked

struct Region {
  uint64_t begin;
  uint64_t size;
};

// The last accesses of a byte. `write` and `read` are words made by access_word.
struct Cell {
  uint64_t write;
  uint64_t read;
};

// A range of device memory that the kernel may write, with one Cell per granule.
struct Shadowed {
  uint64_t begin;
  uint64_t size;
  Cell* cells;
  uint32_t granule_shift;
};

inline constexpr size_t slot_bytes = 64;

enum class Op : uint32_t {
  none,
  simdgroup_barrier,
  threadgroup_barrier,
  simd_reduce,
  simd_scan,
  simd_shuffle,
  simd_vote,
  quad,
  simdgroup_multiply,
  tensor_operation,
};

// A flag for `barrier`: all threads must reach the same tensor operation, which orders no memory.
inline constexpr uint32_t tensor_operation_flag = 1u << 31;

using Combine = void (*)(const unsigned char (*in)[slot_bytes], unsigned char (*out)[slot_bytes]);

struct Simdgroup {
  alignas(64) unsigned char in[32][slot_bytes];
  alignas(64) unsigned char out[32][slot_bytes];
  uint32_t epoch;  // counts simdgroup_barriers since the last threadgroup_barrier
};

struct Thread {
  uint32_t in_threadgroup[3];
  uint32_t index;
  uint32_t lane;
  uint32_t simdgroup_index;
  uint64_t convergence;  // hash of the simdgroup_load and simdgroup_store calls made; equal in all lanes
  Simdgroup* simdgroup;
};

enum class Race : uint32_t { write_after_write, write_after_read, read_after_write, uninitialized };

struct State {
  Region regions[max_tags];
  uint32_t region_count;
  Thread* thread;
  uint32_t threadgroup_in_grid[3];
  uint32_t threads_per_threadgroup[3];           // of this threadgroup
  uint32_t dispatch_threads_per_threadgroup[3];  // of the dispatch
  uint32_t threadgroups_per_grid[3];
  uint32_t threads_per_grid[3];
  uint32_t thread_count;  // threads in this threadgroup

  // Race detection. Epochs only ever increase, so shadow memory never needs clearing.
  uint64_t threadgroup_begin;
  uint64_t threadgroup_size;
  Cell* threadgroup_cells;
  uint32_t threadgroup_epoch, threadgroup_start;               // now; at the start of this threadgroup
  uint32_t device_epoch, device_start, device_dispatch_start;  // now; of this threadgroup; of this run
  uint32_t shadowed_count;
  Shadowed shadowed[32];

  void (*count_access)(uint64_t address, uint64_t bytes, bool is_write, bool is_atomic);  // null: not counted

  // Callbacks of the engine. The first three do not return.
  void (*bad_access)(uint64_t pointer, uint64_t bytes, uint64_t alignment, const void* where);
  void (*bad_sharing)(Race race, uint64_t address, uint64_t other, bool device, const void* where);
  void (*violation)(const char* rule, const char* message, const void* where);
  void (*barrier)(uint32_t flags, uint64_t site);
  void (*rendezvous)(Op op, uint64_t site, Combine combine, uint32_t flags);
};

// [[buffer(n)]] and [[threadgroup(n)]] parameters as the shader declares them.
struct ParameterInfo {
  const char* name;
  uint32_t space;  // 0 device, 1 constant, 2 threadgroup
  uint32_t index;
  uint32_t is_const;
  uint32_t is_reference;
  uint64_t element_size;
  uint64_t element_alignment;
};

struct StaticVariable {
  const void* kernel;  // identity of the kernel instantiation that declares it
  uint64_t size;
  uint64_t alignment;
  uint32_t ordinal;  // its index in the kernel's text, from 0
  uint32_t tag;      // set when the library is loaded, as is offset
  uint64_t offset;
  StaticVariable* next;
};

struct KernelInfo {
  const char* name;
  void (*entry)();
  uint32_t parameter_count;
  const ParameterInfo* parameters;
  uint32_t max_threads;
  uint64_t static_bytes;
  uint32_t static_count;
  const void* identity;     // `kernel` of its StaticVariables
  StaticVariable* statics;  // of the whole library
  KernelInfo* next;
};

// access word: [epoch 32][simdgroup epoch 18][thread 10][kind 4]
inline constexpr uint64_t kind_mask = 15;
inline constexpr uint64_t several_lanes = 1, several_simdgroups = 2, several_threadgroups = 4, atomic = 8;

__attribute__((always_inline)) inline constexpr uint64_t access_word(uint32_t epoch, uint32_t simdgroup_epoch,
                                                                     uint32_t thread) {
  return uint64_t(epoch) << 32 | uint64_t(simdgroup_epoch & 0x3ffff) << 14 | uint64_t(thread & 1023) << 4;
}
__attribute__((always_inline)) inline constexpr uint32_t word_epoch(uint64_t word) { return uint32_t(word >> 32); }
__attribute__((always_inline)) inline constexpr uint32_t word_simdgroup_epoch(uint64_t word) {
  return uint32_t(word >> 14) & 0x3ffff;
}
__attribute__((always_inline)) inline constexpr uint32_t word_thread(uint64_t word) {
  return uint32_t(word >> 4) & 1023;
}

}  // namespace metal_sim::abi
