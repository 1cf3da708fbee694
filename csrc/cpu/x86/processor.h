// The instructions that only some processors with AVX-512 have, detected at run time. Functions that use them are
// marked with the macro of the same name, so that the compiler can use them, too.
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe_metal {

inline bool vbmi_available() {
  static const bool available = __builtin_cpu_supports("avx512vbmi");
  return available;
}

// AVX512-BF16, and VBMI, which every processor with AVX512-BF16 has.
#define MOE_METAL_BF16 gnu::target("avx512bf16,avx512vbmi")
inline bool bfloat16_available() {
  static const bool available = __builtin_cpu_supports("avx512bf16") && vbmi_available();
  return available;
}

// Whether a product of 32 bfloat16 takes no longer than one of 64 bytes or of 16 floats. On an Emerald Rapids it takes
// four times as long.
inline bool bfloat16_is_fast() {
  static const bool fast = bfloat16_available() && __builtin_cpu_is("amd");
  return fast;
}

#define MOE_METAL_VNNI gnu::target("avx512vnni")
inline bool vnni_available() {
  static const bool available = __builtin_cpu_supports("avx512vnni");
  return available;
}

// AMX for bfloat16: available if the processor has it and Linux lets this process use it.
#define MOE_METAL_AMX gnu::target("amx-tile,amx-bf16")
inline bool amx_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    constexpr unsigned kAll = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

}  // namespace moe_metal
