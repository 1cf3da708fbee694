// Which of the processor's instructions the kernels use. Every condition on a processor is here.
//
// MOE_METAL_HAS_*  all processors of this library have them: it is compiled for them.
// *_available()    some of its processors have them: each is asked when the process starts to use them. The functions
//                  that use them are marked with the macro of that name, which lets the compiler use them, too.
#pragma once
#include <cstdint>

#if defined(CPU_CAPABILITY_AVX512)
#define MOE_METAL_HAS_AVX512
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#define MOE_METAL_HAS_AVX2
#endif
#if defined(__aarch64__)
#define MOE_METAL_HAS_NEON
#endif
#if defined(__ARM_FEATURE_DOTPROD)  // on every Mac, since Apple's compiler takes the M1 where no processor is named
#define MOE_METAL_HAS_DOTPROD
#endif

#ifdef MOE_METAL_HAS_AVX512  // on Linux: PyTorch has no other build for these processors that we compile for
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe_metal {

#if defined(MOE_METAL_HAS_AVX512) || defined(MOE_METAL_HAS_NEON)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif
// Whether packed numbers become floats in registers. NEON's vectors are too short for that, and without either
// Vectorized is a loop over an array in memory.
#ifdef MOE_METAL_HAS_AVX2
constexpr bool kUnpacksInRegisters = true;
#else
constexpr bool kUnpacksInRegisters = false;
#endif
constexpr int64_t kLine = 64;  // bytes that memory hands out at a time

#ifdef MOE_METAL_HAS_AVX512
// AVX512-BF16, and VBMI, which every processor with the one has.
#define MOE_METAL_BF16 gnu::target("avx512bf16,avx512vbmi")
inline bool bfloat16_available() {
  static const bool available = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  return available;
}

// AVX512-VNNI.
#define MOE_METAL_VNNI gnu::target("avx512vnni")
inline bool vnni_available() {
  static const bool available = __builtin_cpu_supports("avx512vnni");
  return available;
}

// AMX for bfloat16 and for bytes: whether the processor has it and Linux lets this process use it.
#define MOE_METAL_AMX gnu::target("amx-tile,amx-bf16")
#define MOE_METAL_AMX_INTEGERS gnu::target("amx-tile,amx-int8,avx512vnni")
inline bool amx_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

#define MOE_METAL_UNROLL _Pragma("GCC unroll 16")
#endif

}  // namespace moe_metal
