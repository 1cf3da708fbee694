// The products of packed rows that the processor has instructions for. A format whose reader names one that the
// processor lacks has none.
#pragma once
#include "cpu/weights/scaled_rows.h"

#ifdef MOE_METAL_HAS_AVX512
#include "cpu/x86/amx_int8.h"
#include "cpu/x86/e4m3_dots.h"
#include "cpu/x86/vnni.h"
#else
namespace moe_metal {
template <int bits, bool e2m1>
struct Integers;
template <class Numbers>
using IntegerDots = NoDots;
template <class Numbers>
using IntegerTiles = NoDots;
using E4m3Dots = NoDots;
}  // namespace moe_metal
#endif
