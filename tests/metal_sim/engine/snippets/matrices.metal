//: mx_at_member | refuses | engine
KERNEL { simdgroup_half8x8 m(2.0h); x[i] = m.at.y; }
//: mx_brace_init | ? | accepted
KERNEL { simdgroup_float8x8 m{}; simdgroup_store(m, x); }
//: mx_ctor_int | ? | accepted
KERNEL { simdgroup_float8x8 m(2); simdgroup_store(m, x); }
//: mx_dyn_index | ? | accepted
KERNEL { simdgroup_half8x8 all[3]; for (uint n = 0; n < 3; ++n) all[n] = simdgroup_half8x8(half(n)); x[i] = all[uint(x[0]) % 3].thread_elements()[0]; }
//: mx_filled | ok
KERNEL { simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(1.5f), n = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_matrix<half, 8> h(1.0h); simdgroup_multiply_accumulate(n, m, m, n); simdgroup_multiply_accumulate(n, h, h, n); simdgroup_store(n, x, 8, ulong2(0, 8)); }
//: mx_filled_int | refuses | engine
KERNEL { simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(0); simdgroup_store(m, x); }
//: mx_filled_other_size | refuses | engine
KERNEL { auto m = make_filled_simdgroup_matrix<float, 4>(1.5f); x[i] = 1; }
//: mx_in_device | refuses | engine
kernel void k(device simdgroup_half8x8* m [[buffer(0)]], device float* x [[buffer(1)]]) { x[0] = 1; }
//: mx_in_threadgroup | refuses | engine
KERNEL { threadgroup simdgroup_half8x8 tiles[2]; x[i] = 1; }
//: mx_index | refuses | engine
KERNEL { simdgroup_float8x8 m(2.0f); x[i] = m[1][1]; }
//: mx_int | refuses | engine
KERNEL { simdgroup_matrix<uint, 8, 8> m; x[i] = 1; }
//: mx_load_const_tg | ok
inline void load(thread simdgroup_half8x8& m, threadgroup const half* from) { simdgroup_load(m, from, 16, 0, true); }
KERNEL { threadgroup half tile[128]; for (uint n = i; n < 128; n += 32) tile[n] = 1; threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_half8x8 m; load(m, tile); x[i] = m.thread_elements().x; }
//: mx_load_constant | refuses | address_spaces
kernel void k(constant half* c [[buffer(0)]], device half* y [[buffer(1)]]) { simdgroup_half8x8 m; simdgroup_load(m, c); simdgroup_store(m, y); }
//: mx_load_float4 | refuses | engine
kernel void k(device float4* q [[buffer(0)]], device float* y [[buffer(1)]]) { simdgroup_float8x8 m; simdgroup_load(m, q, 2); simdgroup_store(m, y); }
//: mx_load_half_into_float | refuses | engine
kernel void k(device half* h [[buffer(0)]], device float* y [[buffer(1)]]) { simdgroup_float8x8 m; simdgroup_load(m, h); simdgroup_store(m, y); }
//: mx_load_thread | refuses | engine
KERNEL { float tile[64] = {}; simdgroup_float8x8 m; simdgroup_load(m, tile); simdgroup_store(m, x); }
//: mx_mac_bf_half | refuses | engine
KERNEL { simdgroup_float8x8 sum(0.0f); simdgroup_half8x8 h(1.0h); simdgroup_bfloat8x8 b(bfloat(2.0f)); simdgroup_multiply_accumulate(sum, h, b, sum); simdgroup_store(sum, x); }
//: mx_mac_mixed_ab | ? | accepted | llama.cpp multiplies half by float
KERNEL { simdgroup_float8x8 sum(0.0f), f(1.0f); simdgroup_half8x8 h(1.0h); simdgroup_multiply_accumulate(sum, f, h, sum); simdgroup_store(sum, x); }
//: mx_mixed_mac | refuses | engine
kernel void k(device half* y [[buffer(0)]]) { simdgroup_half8x8 sum(0.0h); simdgroup_float8x8 a(1.0f), b(2.0f); simdgroup_multiply_accumulate(sum, a, b, sum); simdgroup_store(sum, y); }
//: mx_not_included | ? | accepted
#include <metal_stdlib>
using namespace metal;
KERNEL { simdgroup_float8x8 m(2.0f); simdgroup_store(m, x); }
//: mx_operator_add | refuses | engine
KERNEL { simdgroup_float8x8 a(1.0f), b(2.0f); simdgroup_store(a + b, x); }
//: mx_operator_mul | ok
KERNEL { simdgroup_float8x8 a(1.0f), b(2.0f); simdgroup_store(a * b, x); }
//: mx_origin_int | ? | accepted
KERNEL { simdgroup_float8x8 a; simdgroup_load(a, x, 16, 0); simdgroup_store(a, x, 16, 8); }
//: mx_origin_uint2 | refuses | engine
KERNEL { simdgroup_float8x8 a; simdgroup_load(a, x, 16, uint2(8, 0)); simdgroup_store(a, x); }
//: mx_size | refuses | engine
KERNEL { simdgroup_matrix<half, 4, 4> m; x[i] = 1; }
//: mx_thread_elements_vec4 | refuses | elements_of_a_lane
KERNEL { simdgroup_float8x8 a(1.0f); x[i] = a.thread_elements()[3]; }
//: mx_thread_elements_as_vec4 | refuses | address_spaces
KERNEL { simdgroup_float8x8 a(1.0f); float4 v = a.thread_elements(); x[i] = v.x; }
//: mx_zero_init | refuses | engine
KERNEL { simdgroup_float8x8 m = 2.0f; simdgroup_store(m, x); }
