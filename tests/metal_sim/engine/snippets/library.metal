//: lib_array_size | ok
KERNEL { array<float, 3> v = {1, 2, 3}; v[i % 3] += 1; x[i] = v[0] + v.size(); }
//: lib_assert | refuses | engine
KERNEL { assert(i < 4); x[i] = 1; }
//: lib_builtin_assume | ok
KERNEL { __builtin_assume(i < 64); if (i > 64) __builtin_unreachable(); x[i] = 1; }
//: lib_builtin_bit_cast | ? | accepted
KERNEL { x[i] = __builtin_bit_cast(float, uint(i << 20)); }
//: lib_builtin_clz | ? | accepted
KERNEL { x[i] = __builtin_clz(i + 1) + __builtin_popcount(i); }
//: lib_builtin_expect | ok
KERNEL { if (__builtin_expect(i == 3, 1)) x[i] = 1; }
//: lib_builtin_expf | refuses | builtin_functions
KERNEL { x[i] = __builtin_tanhf(x[i]); }
//: lib_builtin_fabsf | ? | accepted
KERNEL { x[i] = __builtin_fabsf(x[i]); }
//: lib_builtin_inf | ok
KERNEL { x[i] = i ? __builtin_inff() : __builtin_nanf(""); }
//: lib_builtin_memcpy | refuses | builtin_functions
KERNEL { __builtin_memcpy(x, x + 8, 16); }
//: lib_memcpy | refuses | engine
KERNEL { memcpy(x, x + 8, 16); }
//: lib_c_include | ? | accepted
#include <metal_math>
#include <metal_simdgroup>
using namespace metal;
KERNEL { x[i] = tanh(x[i]); }
//: lib_cstdint | refuses | translation
#include <metal_stdlib>
#include <cstdint>
KERNEL { x[i] = 1; }
//: lib_std_type_traits | refuses | translation
#include <metal_stdlib>
#include <type_traits>
KERNEL { x[i] = 1; }
//: lib_no_include | refuses | translation
kernel void k(device float* x [[buffer(0)]]) { x[0] = metal::exp(x[0]); }
//: lib_no_include_no_names | ok
kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]]) { for (int i = 0; i < n; ++i) x[i] = half(i) / 2; }
//: lib_not_metal_ns | refuses | engine
#include <metal_stdlib>
KERNEL { x[i] = tanh(x[i]); }
//: lib_metal_ns | ok
#include <metal_stdlib>
KERNEL { x[i] = metal::tanh(x[i]) + metal::precise::exp(x[i]); }
//: lib_element_at | refuses | engine
KERNEL { float4 v = x[i]; v.set(0, 1); x[i] = v.element_at(2); }
//: lib_shim_each | refuses | engine
struct Twice { float operator()(float v) const { return 2 * v; } };
KERNEL { x[i] = each(float2(x[i]), Twice()).y; }
//: lib_shim_fill | refuses | engine
KERNEL { float v[2]; fill<float, 2>(v, float2(1)); x[i] = v[1]; }
//: lib_is_scalar_v | refuses | engine
KERNEL { x[i] = is_scalar_v<half> ? 1 : 0; }
//: lib_simulator_names | refuses | names_of_the_simulator
KERNEL { float4 v = x[i]; x[i] = v.msl_get(2); }
//: lib_own_names | ok
inline float get(float v) { return v; }
inline float put(float v) { return v; }
inline float fill(float v) { return v; }
inline float exchange(float v) { return v; }
inline float erf(float v) { return v * v; }
inline float expm1(float v) { return v + 1; }
template <typename T> T each(T v) { return v + v; }
struct Params { float value, rg, at; };
KERNEL { Params p = {1, 2, 3}; float slots = get(put(fill(x[i]))), shuffle = p.value + p.rg + p.at; x[i] = exchange(each(slots)) + erf(expm1(shuffle)); }
//: lib_fdim | ok
KERNEL { x[i] = fdim(x[i], 2.0f) + nextafter(x[i], 2.0f); }
//: lib_ilogb | ok
KERNEL { x[i] = ilogb(x[i]); }
//: lib_ldexp_vec | ok
KERNEL { x[i] = ldexp(x[i], 3); }
//: lib_extract_bits | ? | accepted
KERNEL { x[i] = extract_bits(i, 4u, 8u); }
//: lib_limits | ok
KERNEL { x[i] = i ? float(numeric_limits<bfloat>::max()) : numeric_limits<float>::lowest(); }
//: lib_mulhi_mixed | refuses | engine
KERNEL { x[i] = mulhi(i, 5); }
//: lib_rotate_mixed | refuses | engine
KERNEL { x[i] = rotate(i, 3); }
//: lib_popcount_float | refuses | engine
KERNEL { x[i] = popcount(x[i] + 1); }
//: lib_fast_min | ok
KERNEL { x[i] = fast::max(x[i], 2.0f) + precise::divide(x[i], 3.0f) + precise::sqrt(float2(x[i])).y + fast::pow(x[i], 2.0f); }
//: lib_precise_saturate | ? | accepted
KERNEL { x[i] = fast::saturate(x[i]); }
//: lib_fast_exp_bfloat | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = fast::exp2(b[1]); }
//: lib_fast_rsqrt_half | refuses | engine
kernel void k(device half* h [[buffer(0)]]) { h[0] = fast::sqrt(h[1]); }
//: lib_precise_tanh_half | refuses | engine
kernel void k(device half* h [[buffer(0)]]) { h[0] = precise::exp(h[1]); }
//: lib_fast_fma | refuses | engine
KERNEL { x[i] = fast::fma(x[i], 3.0f, 1.0f); }
//: lib_precise_mix | refuses | engine
KERNEL { x[i] = precise::mix(x[i], 3.0f, 0.5f); }
//: lib_precise_{fabs floor round trunc ceil sign rint fract} | refuses | engine
KERNEL { x[i] = precise::NAME(x[i]); }
//: lib_precise_{copysign step} | refuses | engine
KERNEL { x[i] = precise::NAME(x[i], 2.0f); }
//: lib_{cbrt degrees erfinv exp2f expf expm1 fabsf isinff log1p logb lround native_exp nearbyint rcp sigmoid sqrtf erf erfc lgamma tgamma} | refuses | engine
KERNEL { x[i] = NAME(x[i]); }
//: lib_{fmaxf hypot remainder swap} | refuses | engine
KERNEL { x[i] = NAME(x[i], 2.0f); }
//: lib_lerp | refuses | engine
KERNEL { x[i] = lerp(x[i], 2.0f, 0.5f); }
