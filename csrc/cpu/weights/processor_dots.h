// Products of packed rows with special instructions. On processors without them they are NoDots.
#pragma once
#include "cpu/weights/scaled_rows.h"

#ifdef MOE_METAL_HAS_AVX512
#include "cpu/x86/amx_int8.h"
#include "cpu/x86/bfloat16_dots.h"
#include "cpu/x86/integer_panels.h"
#elif defined(MOE_METAL_HAS_DOTPROD)
#include "cpu/arm/integer_dots.h"
namespace moe_metal {
template <class Numbers>
using IntegerTiles = NoDots;
template <class Numbers>
using IntegerPanels = NoDots;
template <int Group>
using E4m3Dots = NoDots;
}  // namespace moe_metal
#else
namespace moe_metal {
template <int bits, bool e2m1>
struct Integers;
template <class Numbers>
using IntegerDots = NoDots;
template <class Numbers>
using IntegerTiles = NoDots;
template <class Numbers>
using IntegerPanels = NoDots;
template <int Group>
using E4m3Dots = NoDots;
}  // namespace moe_metal
#endif

namespace moe_metal {
#ifdef MOE_METAL_HAS_AVX512
template <class Numbers>
using FewDots = std::conditional_t<BFloat16Dots<Numbers>::kExists, BFloat16Dots<Numbers>, IntegerDots<Numbers>>;
#else
template <class Numbers>
using FewDots = IntegerDots<Numbers>;
#endif
}  // namespace moe_metal
