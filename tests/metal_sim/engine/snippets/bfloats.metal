//: bf_as_type_array | refuses | engine
KERNEL { x[i] = as_type<float3>(packed_float3(x[i])).y; }
//: bf_as_type_bool | refuses | engine
KERNEL { x[i] = as_type<uchar>(x[i] > 0); }
//: bf_as_type_ptr | refuses | engine
KERNEL { x[i] = float(as_type<ulong>(x + i) % 8); }
//: bf_as_type_size | refuses | engine
kernel void k(device uint* y [[buffer(0)]], device bfloat* b [[buffer(1)]]) { y[0] = as_type<uint>(b[0]); }
//: bf_as_type_struct | refuses | engine
struct Word { int bits; };
KERNEL { Word w = {7}; x[i] = as_type<float>(w); }
//: bf_as_type_vec3 | ? | accepted
KERNEL { x[i] = as_type<int3>(float3(x[i])).z; }
//: bf_as_type | ok
KERNEL { ushort bits = as_type<ushort>(bfloat(x[i])); half4 h = as_type<half4>(uint2(i)); x[i] = as_type<float>(uint(bits) << 16) + h.x; }
//: bf_assign_float_op | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] *= 2.0f; }
//: bf_brace_float | refuses | address_spaces
kernel void k(device bfloat* b [[buffer(0)]], device float* f [[buffer(1)]]) { b[0] = bfloat{f[0]}; }
//: bf_compare | ok
kernel void k(device bfloat* b [[buffer(0)]], device float* f [[buffer(1)]]) { if (b[0] >= f[0] || f[1] == b[1] || b[2] < b[3]) f[2] = 1; }
//: bf_exp | ? | engine
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = log(b[1]); }
//: bf_from_int | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]]) { bfloat zero = 0; b[0] = zero; }
//: bf_implicit_float | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]], device float* f [[buffer(1)]]) { b[0] = f[0]; }
//: bf_incr | ? | engine
kernel void k(device bfloat* b [[buffer(0)]]) { bfloat n = b[0]; ++n; b[0] = n; }
//: bf_init_zero_braces | ? | accepted
kernel void k(device bfloat* b [[buffer(0)]]) { bfloat zero{}; b[0] = zero; }
//: bf_literal | ? | accepted
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = 2.5bf; }
//: bf_max | ? | engine
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = min(b[1], b[2]); }
//: bf_mixed_add | ok
kernel void k(device bfloat* b [[buffer(0)]], device float* f [[buffer(1)]]) { f[0] = b[0] * f[0] - b[1]; f[1] = b[0] / 2.0f + 1.0f; }
//: bf_mixed_half | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]], device half* h [[buffer(1)]]) { b[1] = bfloat(float(h[0] * b[0])); }
//: bf_ret_float | refuses | engine
inline bfloat twice(float v) { return 2 * v; }
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = twice(2); }
//: bf_switch_float | refuses | engine
KERNEL { switch (x[i]) { case 0: x[i] = 1; break; } }
//: bf_ternary | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]]) { b[0] = float(b[1]) > 0 ? b[1] : 1.0f; }
//: bf_to_half | refuses | engine
kernel void k(device bfloat* b [[buffer(0)]], device half* h [[buffer(1)]]) { h[0] = b[0]; }
//: bf_arithmetic | ok
kernel void k(device bfloat* b [[buffer(0)]]) { bfloat v = b[0] * b[1] - b[2] / b[3]; v += b[4]; b[5] = -v; b[6] = bfloat(float(v) + 1.0f); }
//: bf_vec_arith | ? | accepted
kernel void k(device bfloat4* b [[buffer(0)]]) { b[0] = b[1] + b[2]; }
//: bf_vec_conv | ? | accepted
kernel void k(device bfloat4* b [[buffer(0)]], device float4* f [[buffer(1)]]) { f[0] = float4(b[0]); }
//: bf_vec_ctor_float | ? | accepted
kernel void k(device bfloat4* b [[buffer(0)]], device float4* f [[buffer(1)]]) { b[0] = bfloat4(f[0].x, f[0].y, f[0].z, 1.0f); }
//: bf_vec_from_float4 | ? | accepted
kernel void k(device bfloat4* b [[buffer(0)]], device float4* f [[buffer(1)]]) { b[0] = bfloat4(f[0]); }
//: bf_vec_splat_int | ? | engine
kernel void k(device bfloat4* b [[buffer(0)]]) { b[0] = bfloat4(1); }
