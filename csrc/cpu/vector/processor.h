// The instruction sets that this library is compiled for, and what follows from them. MOE_METAL_HAS_* means that all of
// its processors have these instructions.
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
#if defined(__ARM_FEATURE_DOTPROD)  // defined on every Mac: the M1 is the default target of Apple's compiler
#define MOE_METAL_HAS_DOTPROD
#endif

namespace moe_metal {

#if defined(MOE_METAL_HAS_AVX512) || defined(MOE_METAL_HAS_NEON)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif
// Whether products unpack rows in registers. NEON's vectors are too short for that, and at::vec's vectors without AVX2
// are arrays in memory.
#ifdef MOE_METAL_HAS_AVX2
constexpr bool kUnpacksInRegisters = true;
#else
constexpr bool kUnpacksInRegisters = false;
#endif
constexpr int64_t kLine = 64;    // bytes of a cache line
constexpr int64_t kPage = 4096;  // bytes of a page of memory, at least
#define MOE_METAL_UNROLL _Pragma("GCC unroll 16")

}  // namespace moe_metal
