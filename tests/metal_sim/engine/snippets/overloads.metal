//: ov_abs_uint | ok
KERNEL { x[i] = abs(i + 2) + abs(int(i) - 2); }
//: ov_and_float_vec | refuses | engine
KERNEL { x[i] = (float2(x[i]) || float2(2)).y; }
//: ov_and_bool_vec | ok
KERNEL { bool2 both = float2(x[i]) > 1.0f && !(float2(2) < x[i]); x[i] = all(both || bool2(false)); }
//: ov_clamp_float_int | refuses | engine
KERNEL { x[i] = clamp(x[i], 1, 2); }
//: ov_clamp_uint_int | refuses | engine
KERNEL { x[i] = clamp(i, 1, 2); }
//: ov_clamp_vec_int | ? | accepted
KERNEL { x[i] = clamp(float2(x[i]), -1, 2).y; }
//: ov_clamp_vec_scalar | ok
KERNEL { x[i] = clamp(float2(x[i]), -1.0f, 2.0f).y; }
//: ov_dot_bfloat | refuses | engine
kernel void k(device bfloat4* b [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = float(dot(b[0], b[1])); }
//: ov_dot_int | refuses | engine
KERNEL { x[i] = dot(int2(i), int2(2, 3)); }
//: ov_dot_uint | refuses | engine
KERNEL { x[i] = length_squared(uint3(i)); }
//: ov_dot | ok
KERNEL { x[i] = dot(float3(x[i]), float3(1)) + float(dot(half2(1), half2(2))) + length(float2(x[i])); }
//: ov_dot_mixed | refuses | engine
KERNEL { x[i] = dot(half3(1), float3(x[i])); }
//: ov_dot_scalar | refuses | engine
KERNEL { x[i] = dot(x[i], 2.0f); }
//: ov_exp_int | refuses | engine
KERNEL { x[i] = tanh(3); }
//: ov_fabs_int | refuses | engine
KERNEL { x[i] = fabs(int(i) - 4); }
//: ov_float_to_half_ret | ok
inline half narrow(float v) { return v; }
KERNEL { half h = narrow(x[i]); x[i] = h; }
//: ov_fma_mixed | ok
KERNEL { x[i] = fma(x[i], 3, 1.0f) + mix(x[i], 2.0f, 1) + pow(x[i], 3) + step(x[i], 2); }
//: ov_fmod_int | refuses | engine
KERNEL { x[i] = fmod(7, 2); }
//: ov_half_literal_narrow | ? | accepted
KERNEL { half h = 1e7; x[i] = h; }
//: ov_half_vec_float_scalar | ? | address_spaces
KERNEL { x[i] = (half2(2) * 1.5f).y; }
//: ov_int_vec_float_scalar | refuses | address_spaces
KERNEL { x[i] = (uint2(i) * 1.5f).y; }
//: ov_isnan_int | refuses | engine
KERNEL { x[i] = isinf(i) ? 1 : 0; }
//: ov_length_scalar | ? | engine
KERNEL { x[i] = length(x[i] + 1); }
//: ov_max_float_double_lit | ok
KERNEL { x[i] = min(x[i], 1.5) + clamp(x[i], 0., 1e2); }
//: ov_max_float_int | refuses | engine
KERNEL { x[i] = min(x[i], 1); }
//: ov_max_half_float | refuses | engine
KERNEL { x[i] = max(half(x[i]), 1.0f); }
//: ov_max_uint_int | refuses | engine
KERNEL { x[i] = min(i, 7); }
//: ov_max_vec_int | ? | accepted
KERNEL { x[i] = min(float2(x[i]), 1).y; }
//: ov_min_bool | ? | accepted
KERNEL { x[i] = max(x[i] > 0, i > 4); }
//: ov_min_enum | ? | accepted
enum : uint { kMost = 4 };
KERNEL { x[i] = min(i, kMost); }
//: ov_min_short_int | refuses | engine
KERNEL { short s = short(i); x[i] = max(s, 2); }
//: ov_min_sizet | refuses | engine
KERNEL { size_t n = i; x[i] = max(n, i); }
//: ov_min_ulong_uint | refuses | engine
KERNEL { ulong n = i; x[i] = max(i, n); }
//: ov_min_ushort_expr | ? | engine
KERNEL { ushort n = ushort(i); x[i] = max(n, n - 1); }
//: ov_min_vec_scalar | ? | accepted
KERNEL { x[i] = max(float2(x[i]), 0.5f).y; }
//: ov_mix_vec_scalar | ok
KERNEL { x[i] = mix(float2(x[i]), float2(1), 0.25f).y; }
//: ov_mod_float | refuses | engine
KERNEL { x[i] = (x[i] + 1) % 2.0f; }
//: ov_mod_float_vec | refuses | engine
KERNEL { x[i] = (float2(x[i]) % float2(2)).y; }
//: ov_pow_vec_scalar | refuses | engine
KERNEL { x[i] = pow(float2(x[i]), 3.0f).y; }
//: ov_select_mixed | refuses | engine
KERNEL { x[i] = select(x[i], 1, i < 4); }
//: ov_select_uint_cond | ? | accepted
KERNEL { x[i] = select(x[i], 2.0f, i % 2); }
//: ov_shift_float_vec | refuses | engine
KERNEL { x[i] = (float2(x[i]) >> float2(1)).y; }
//: ov_sign_int | refuses | engine
KERNEL { x[i] = sign(int(i) - 3); }
//: ov_sqrt_uint | refuses | engine
KERNEL { x[i] = rsqrt(i + 1); }
//: ov_uint_vec_negative | ? | accepted
KERNEL { x[i] = (uint2(i) * -1).y; }
//: ov_vec5 | refuses | engine
KERNEL { vec<float, 6> v; x[i] = sizeof(v); }
//: ov_vec_brace_assign | ok
KERNEL { const uint a = i, b = i + 1; uint4 v = {a, b, a, b}; float2 w = {x[i], 2}; v = {a, a, a, a}; x[i] = v.x + w.y; }
//: ov_vec_brace_short | ? | engine
KERNEL { float3 v = {x[i], 2}; x[i] = v.z; }
//: ov_vec_cond | refuses | engine
KERNEL { if (float2(x[i]) < float2(2)) x[i] = 1; }
//: ov_vec_ctor_few | refuses | engine
KERNEL { x[i] = float3(1, 2).x; }
//: ov_vec_of_struct | refuses | address_spaces
struct Cell { float v; };
KERNEL { x[i] = sizeof(vec<Cell, 4>); }
//: ov_vec_implicit | refuses | engine
KERNEL { float2 v = half2(1, 2); x[i] = v.y; }
//: ov_vec_implicit_fn | refuses | engine
inline float sum(float2 v) { return v.x + v.y; }
KERNEL { x[i] = sum(half2(1, 2)); }
//: ov_vec_incr | ok
KERNEL { uint2 v = i; ++v; v++; int3 w = int(i); w--; x[i] = v.x + w.z; }
//: ov_packed | ok
kernel void k(device packed_float3* p [[buffer(0)]], device float* x [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  const float3 v = p[i]; p[i] = v * 2; x[i] = p[i].z + p[i][0] + dot(float3(p[i]), v); p[i + 1] = p[i] + v - 2.0f * p[0]; x[0] = p[i].zyx.x; }
//: ov_vec_int_float_binop | refuses | engine
KERNEL { x[i] = (float2(x[i]) + int2(2)).y; }
//: ov_vec_mixed_binop | refuses | engine
KERNEL { x[i] = (half2(2) - float2(x[i])).y; }
//: ov_vec_neg_bool | refuses | engine
KERNEL { bool2 b = float2(x[i]) > 1.0f; x[i] = float((-b).y); }
//: ov_vec_not_float | refuses | engine
KERNEL { x[i] = (~float2(x[i])).y; }
//: ov_vec_ptr_cast | ? | accepted
KERNEL { float v[4] = {x[i], 1, 2, 3}; thread float2* pairs = (thread float2*)v; x[i] = pairs[1].x; }
//: ov_vec_rgba | ok
KERNEL { float4 c = float4(x[i], 0, 1, 1); c.rg = c.bg; c.a = 0.5f; half2 two = 1; x[i] = c.bgr.x + c.r + c.rgba.w + two.g; }
//: ov_vec_s0 | refuses | engine
KERNEL { x[i] = float2(x[i]).s1; }
//: ov_vec_lo | refuses | engine
KERNEL { x[i] = float4(x[i]).lo.x; }
//: ov_vec_ternary | refuses | engine
KERNEL { x[i] = (float2(x[i]) > float2(1) ? float2(1) : float2(2)).y; }
//: ov_vec_trunc | refuses | engine
KERNEL { float2 v = float3(x[i]); x[i] = v.y; }
