//: as_alias_ptr | refuses | pointers_without_a_space
using Row = float*;
KERNEL { Row row = x + i; row[0] = 2; }
//: as_typedef_ptr | refuses | pointers_without_a_space
typedef float* Row;
KERNEL { Row row = x + i; row[0] = 2; }
//: as_array_param | refuses | arrays_without_a_space
inline float last(float v[4]) { return v[3]; }
KERNEL { float v[4] = {0, 1, 2, 3}; x[i] = last(v); }
//: as_array_param_const | refuses | arrays_without_a_space
inline float first(const float v[]) { return v[0]; }
KERNEL { float v[4] = {0, 1, 2, 3}; x[i] = first(v); }
//: as_array_param_thread | ok
inline float last(thread float v[4]) { return v[3]; }
KERNEL { float v[4] = {0, 1, 2, 3}; x[i] = last(v); }
//: as_array_ref_param | refuses | arrays_without_a_space
inline float total(float (&v)[2]) { return v[0] + v[1]; }
KERNEL { float v[2] = {3, 4}; x[i] = total(v); }
//: as_assign_user_op | refuses | address_spaces
struct Sum { float v; Sum() = default; thread Sum& operator=(thread const Sum& s) { v = s.v; return *this; } };
kernel void k(device Sum* to [[buffer(0)]]) { Sum s; s.v = 3; to[0] = s; }
//: as_auto_ref | refuses | pointers_without_a_space
KERNEL { auto& mine = x[i]; mine += 1; }
//: as_auto_ref_ref | refuses | pointers_without_a_space
KERNEL { auto&& mine = x[i]; mine += 1; }
//: as_auto_star | refuses | pointers_without_a_space
KERNEL { auto* from = x; x[i] = from[0]; }
//: as_auto_ref_device | ok
KERNEL { device auto& mine = x[i]; const device auto* from = x; mine += from[0]; }
//: as_const_auto_ref | ? | pointers_without_a_space
KERNEL { const auto& twice = 2 * x[i]; x[i] = twice; }
//: as_const_strip | refuses | address_spaces
KERNEL { float v = 2; thread const float* from = &v; thread float* to = from; x[i] = *to; }
//: as_constant_runtime_init | refuses | address_spaces
inline float half_pi() { return M_PI_F / 2; }
constant float kQuarter = half_pi();
KERNEL { x[i] *= kQuarter; }
//: as_constant_computed | ok
constexpr float half_of(float v) { return v / 2; }
constant constexpr float kHalf = half_of(M_PI_F);
constant float kTable[3] = {1, kHalf, 2 * kHalf};
KERNEL { x[i] *= kTable[i % 3]; }
//: as_constant_uninit | refuses | address_spaces
constant float kScale;
KERNEL { x[i] *= kScale; }
//: as_conversion_op | refuses <4.1 | address_spaces
struct Packed { uint bits; operator float() const { return as_type<float>(bits); } };
kernel void k(device float* x [[buffer(0)]], device Packed* from [[buffer(1)]]) { x[0] = from[0]; }
//: as_copy_ctor_user | refuses | address_spaces
struct Pair { float a, b; Pair() = default; Pair(thread const Pair& p) : a(p.b), b(p.a) {} };
kernel void k(device float* x [[buffer(0)]], device Pair* from [[buffer(1)]]) { Pair p = from[0]; x[0] = p.a; }
//: as_copy_between_all | ok
struct Inner { int4 ids; };
struct Outer { Inner inner; float v[3]; bool on; };
template <typename T> struct Box { T at[2]; };
constant Outer kOuter = {{int4(1)}, {1, 2, 3}, true};
kernel void k(device Outer* to [[buffer(0)]], constant Outer& from [[buffer(1)]], device Box<float>* boxes [[buffer(2)]],
              constant Box<float>& box [[buffer(3)]], uint i [[thread_position_in_threadgroup]]) {
  threadgroup Outer shared[2];
  Outer mine = from, other(to[0]), third{kOuter}, none = {}, named = {.inner = {int4(2)}, .on = false};
  if (i == 0) { shared[0] = mine; shared[1] = to[1]; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  mine = shared[1]; mine = from; other = third;
  to[i] = i == 0 ? mine : other; to[2] = shared[0]; to[3] = from; to[4] = none; to[5] = named; to[6] = {{int4(3)}, {1}, true};
  Box<float> b = boxes[0]; boxes[1] = b; boxes[2] = box; b = {{1, 2}}; boxes[3] = b;
}
//: as_ctor_of_each_space | ok
struct Scale { float by; Scale() thread = default; Scale(float v) thread : by(v) {} Scale(float v, float w) threadgroup { by = v * w; }
               constexpr Scale(int n) constant : by(n) {} };
KERNEL { Scale a(2.0f), b; b = a; x[i] *= b.by; }
//: as_ctor_program_scope | refuses | address_spaces
struct Scale { float by; Scale(float v) : by(v) {} };
constant Scale kScale = Scale(2);
KERNEL { x[i] *= kScale.by; }
//: as_decltype_ptr | refuses | pointers_without_a_space
KERNEL { using T = decltype(0.0f * x[0]); T* row = x; x[i] = row[i]; }
//: as_device_rvalue_ref | refuses | address_spaces
inline float twice(device const float& v) { return v + v; }
KERNEL { x[i] = twice(x[i] + 1); }
//: as_device_to_constant | refuses | address_spaces
inline float first(constant float* v) { return *v; }
KERNEL { x[i] = first(x + i); }
//: as_device_to_constant_cast | refuses | address_spaces
KERNEL { constant float* from = (constant float*)x; x[i] = from[0]; }
//: as_local_constant_var | refuses | address_spaces
KERNEL { constant float primes[3] = {2, 3, 5}; x[i] = primes[i % 3]; }
//: as_local_constexpr_constant | refuses | address_spaces
KERNEL { constexpr constant uint width = 4; x[i] = i % width; }
//: as_local_static_constant | ok
KERNEL { static constant float primes[3] = {2, 3, 5}; x[i] = primes[i % 3]; }
//: as_local_constexpr | ok
KERNEL { constexpr uint width = 4; float v[width] = {}; x[i] = v[i % width]; }
//: as_local_device_var | refuses | address_spaces
KERNEL { device float v = 2; x[i] = v; }
//: as_member_constant_static | ? | address_spaces
struct Tile { static constant uint rows = 8; };
KERNEL { x[i] = Tile::rows; }
//: as_member_constant_constexpr | ok
struct Tile { static constant constexpr uint rows = 8; };
KERNEL { float v[Tile::rows] = {}; x[i] = v[i % Tile::rows]; }
//: as_member_to_thread_const_struct_ref | refuses >=4.1 | address_spaces
struct Shape { uint n; };
inline uint size_of(thread const Shape& s) { return s.n; }
struct View { Shape shape; uint size() const { return size_of(shape); } };
KERNEL { View v = {{3}}; x[i] = v.size(); }
//: as_member_to_thread_ref | refuses >=4.1 | address_spaces
inline void add_one(thread uint& n) { ++n; }
struct Counter { uint n; void next() { add_one(n); } };
KERNEL { Counter c = {0}; c.next(); x[i] = c.n; }
//: as_method_thread | ok
inline void add_one(thread uint& n) { ++n; }
struct Counter { uint n; void next() thread { add_one(n); } uint get() const thread { return n; } };
KERNEL { Counter c = {0}; c.next(); x[i] = c.get(); }
//: as_method_of_each_space | ok
struct Cell { float v; float get() const thread { return v; } float get() const device { return v; }
              float get() const constant { return v; } float get() const threadgroup { return v; } };
kernel void k(device Cell* a [[buffer(0)]], constant Cell& b [[buffer(1)]]) {
  threadgroup Cell c; c.v = 1; threadgroup_barrier(mem_flags::mem_threadgroup);
  Cell d = a[0]; a[1].v = a[0].get() + b.get() + c.get() + d.get();
}
//: as_method_of_temporary | ok
struct Line { float a, b; float at(float x) const { return a * x + b; } };
inline Line line_of(float a) { return {a, 1}; }
KERNEL { x[i] = line_of(x[i]).at(2) + Line{1, 2}.at(3) + Line().at(4); }
//: as_temporary_to_thread_const_ref | ok
template <typename T> struct Line { T a; };
template <typename T> T slope(thread const Line<T>& l) { return l.a; }
inline Line<float> line_of(float a) { return {a}; }
inline float start(thread const Line<float>& l) { return l.a; }
KERNEL { thread const Line<float>& kept = line_of(3); x[i] = slope(Line<float>{x[i]}) + slope(line_of(1)) + start(line_of(2)) + start(kept) + start({4}); }
//: as_temporary_to_thread_ref | refuses | engine
struct Line { float a; };
inline Line line_of(float a) { return {a}; }
inline float start(thread Line& l) { return l.a; }
KERNEL { x[i] = start(line_of(2)); }
//: as_operator_device | refuses <4.1 | address_spaces
struct Complex { float re, im; Complex operator*(Complex c) const { return {re * c.re - im * c.im, re * c.im + im * c.re}; } };
kernel void k(device Complex* z [[buffer(0)]]) { z[2] = z[0] * z[1]; }
//: as_program_const | refuses | address_spaces
const uint kWidth = 8;
KERNEL { x[i] = i % kWidth; }
//: as_program_constexpr | refuses | address_spaces
constexpr uint kWidth = 8;
KERNEL { x[i] = i % kWidth; }
//: as_program_static_const | refuses | address_spaces
static const uint kWidth = 8;
KERNEL { x[i] = i % kWidth; }
//: as_ptr_to_int | ? | accepted
KERNEL { x[i] = float(ulong(x) % 16); }
//: as_reinterpret_other_space | refuses | address_spaces
KERNEL { threadgroup float* tile = reinterpret_cast<threadgroup float*>(x + i); x[i] = tile[0]; }
//: as_ret_member_ref | refuses >=4.1 | address_spaces
struct Row { float v[4]; thread float& at(uint n) { return v[n % 4]; } };
KERNEL { Row row = {}; row.at(i) = 1; x[i] = row.at(0); }
//: as_return_ref | refuses | pointers_without_a_space
inline float& element(device float* p, uint n) { return p[n]; }
KERNEL { element(x, i) = 1; }
//: as_static_constexpr_member | refuses | address_spaces
struct Tile { static constexpr uint rows = 8; };
KERNEL { x[i] = Tile::rows; }
//: as_struct_member_ptr | refuses | pointers_without_a_space
struct View { float* data; };
KERNEL { View v; v.data = x; v.data[i] = 1; }
//: as_swizzle_dup | refuses | address_spaces
KERNEL { float4 v = x[i]; v.yy = float2(3, 4); x[i] = v.y; }
//: as_swizzle_ref | refuses | address_spaces
KERNEL { float4 v = x[i]; thread float2& low = v.xy; low.x = 2; x[i] = v.x; }
//: as_template_T_pointer | refuses | pointers_without_a_space
template <typename T> T at(T* data, uint n) { return data[n]; }
KERNEL { x[i] = at<float>(x, i); }
//: as_template_const_ref | refuses >=4.1 | address_spaces
template <typename T> struct Shape { T n; };
template <typename T> T size_of(thread const Shape<T>& s) { return s.n; }
struct View { Shape<uint> shape; uint size() const { return size_of(shape); } };
KERNEL { View v = {{3}}; x[i] = v.size(); }
//: as_template_const_ref_device | refuses | address_spaces
template <typename T> struct Shape { T n; };
template <typename T> T size_of(thread const Shape<T>& s) { return s.n; }
kernel void k(device float* x [[buffer(0)]], device Shape<uint>* all [[buffer(1)]]) { x[0] = size_of(all[0]); }
//: as_template_const_ref_threadgroup | refuses | address_spaces
template <typename T> struct Shape { T n; };
template <typename T> T size_of(thread const Shape<T>& s) { return s.n; }
KERNEL { threadgroup Shape<uint> all[2]; all[0].n = 4; simdgroup_barrier(mem_flags::mem_threadgroup); x[i] = size_of(all[0]); }
//: as_template_variable | refuses | address_spaces
template <typename T> constexpr uint kPerLoad = 16 / sizeof(T);
KERNEL { x[i] = kPerLoad<half>; }
//: as_ternary_spaces | refuses | address_spaces
KERNEL { threadgroup float tile[8]; tile[i % 8] = 1; x[i] = *(i < 8 ? tile + i : x + i); }
//: as_this_constant | refuses | address_spaces
struct Params { float eps; float squared() const { return eps * eps; } };
kernel void k(device float* x [[buffer(0)]], constant Params& p [[buffer(1)]]) { x[0] = p.squared(); }
//: as_this_device | refuses <4.1 | address_spaces
struct Cell { float v; float twice() const { return 2 * v; } };
kernel void k(device Cell* cells [[buffer(0)]], uint i [[thread_position_in_grid]]) { cells[i].v = cells[0].twice(); }
//: as_this_template_device | refuses <4.1 | address_spaces
template <typename T> struct Cell { T v; void clear() { v = T(0); } };
kernel void k(device Cell<half>* cells [[buffer(0)]], uint i [[thread_position_in_grid]]) { cells[i].clear(); }
//: as_this_threadgroup | refuses <4.1 | address_spaces
struct Cell { float v; void clear() { v = 0; } };
KERNEL { threadgroup Cell cell; cell.clear(); x[i] = 1; }
//: as_this_within | ok
struct Cell { float v; float twice() const { return 2 * v; } float four() const { return 2 * twice(); } };
KERNEL { Cell c{x[i]}; x[i] = c.four(); }
//: as_thread_const_ref_of_device | ? | address_spaces
inline float twice(thread const float& v) { return v + v; }
KERNEL { x[i] = twice(x[i]); }
//: as_thread_const_ref_struct_constant | refuses | address_spaces
struct Params { float eps; };
inline float squared(thread const Params& p) { return p.eps * p.eps; }
kernel void k(device float* x [[buffer(0)]], constant Params& p [[buffer(1)]]) { x[0] = squared(p); }
//: as_thread_const_ref_struct_device | refuses | address_spaces
struct Params { float eps; };
inline float squared(thread const Params& p) { return p.eps * p.eps; }
kernel void k(device float* x [[buffer(0)]], device Params* p [[buffer(1)]]) { x[0] = squared(p[0]); }
//: as_thread_temp_nonconst | refuses | engine
inline float twice(thread float& v) { return v + v; }
KERNEL { x[i] = twice(x[i] + 1); }
//: as_thread_to_constant | refuses | address_spaces
inline float first(constant float* v) { return *v; }
KERNEL { float v = x[i]; x[i] = first(&v); }
//: as_threadgroup_ctor | refuses | engine
struct Best { float value = -INFINITY; };
KERNEL { threadgroup Best best; x[i] = best.value; }
//: as_threadgroup_user_ctor | refuses | engine
struct Best { float value; Best() : value(-INFINITY) {} };
KERNEL { threadgroup Best best[4]; best[i % 4].value = 1; x[i] = 1; }
//: as_threadgroup_default_ctor | ok
struct Best { float value; uint index; Best() = default; };
KERNEL { threadgroup Best best[4]; best[i % 4].value = 1; x[i] = 1; }
//: as_threadgroup_value | refuses | translation
KERNEL { threadgroup float total = 1; x[i] = total; }
//: as_threadgroup_values | refuses | translation
KERNEL { threadgroup float primes[3] = {2, 3, 5}; x[i] = primes[i % 3]; }
//: as_threadgroup_zeros | ok
KERNEL { threadgroup float sums[32] = {0}, all[2][2] = {}; threadgroup bool any = false; threadgroup float4 v(0.0f), w = 0;
  if (i == 0) { sums[0] = 1; all[0][1] = 1; any = true; v = 1; } x[i] = 1; }
//: as_threadgroup_in_struct | refuses | translation
struct Scratch { threadgroup float sum; };
KERNEL { Scratch s; x[i] = 1; }
//: as_threadgroup_nested | ? | accepted
KERNEL { for (uint n = 0; n < 2; ++n) { threadgroup float tile[32]; tile[i % 32] = n; x[i] = tile[i % 32]; } }
//: as_threadgroup_in_helper | refuses | translation
struct Local { float v; };
inline float helper(float v) { threadgroup Local local; local.v = v; return local.v; }
KERNEL { x[i] = helper(2); }
//: as_vec_elem_addr | refuses | address_spaces
KERNEL { float4 v = x[i]; thread float* z = &v.z; *z = 1; x[i] = v.z; }
//: as_vec_elem_arg | refuses | address_spaces
inline void clear(thread float& v) { v = 0; }
KERNEL { float4 v = x[i]; clear(v[2]); x[i] = v.z; }
//: as_vec_elem_device | refuses | address_spaces
kernel void k(device float4* v [[buffer(0)]], uint i [[thread_position_in_grid]]) { device float* z = &v[i].z; *z = 1; }
//: as_vec_elem_ref | refuses | address_spaces
KERNEL { float4 v = x[i]; thread float& z = v.z; z = 1; x[i] = v.z; }
