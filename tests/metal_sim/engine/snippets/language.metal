//: ctl_ok | ok
KERNEL { x[i] = 1 - x[i]; }
//: cxx17_agg_base | refuses <4.0 | address_spaces
struct Shape { uint n; };
struct View : Shape { uint stride; };
KERNEL { View v = {{4}, 2}; x[i] = v.n * v.stride; }
//: cxx17_base | ok
struct Shape { uint n; };
struct View : Shape { uint stride; };
KERNEL { View v; v.n = 4; v.stride = 2; View w = v; x[i] = w.n * w.stride; }
//: cxx17_constexpr_if_ret | ? | accepted | clang takes the discarded branch's type out of a deduced one in C++14, too
template <uint N> auto pick() { if constexpr (N == 1) return 0.5f; else return uint2(N); }
KERNEL { x[i] = pick<1>() + pick<2>().y; }
//: cxx17_ctad | refuses <4.0 | newer_language
template <typename T> struct Box { T v; Box(T first) : v(first) {} };
KERNEL { Box b(x[i]); x[i] = b.v; }
//: cxx17_elision | refuses <4.0 | accepted | the front end is C++17, which needs no copy here
struct Once { float v; Once(float first) : v(first) {} Once(thread const Once& o) = delete; };
inline Once once(float v) { return Once(v); }
KERNEL { Once o = once(x[i]); x[i] = o.v; }
//: cxx17_enum_brace | refuses <4.0 | braced_enums
enum class Mode : uint { add, multiply };
KERNEL { Mode mode{i % 2}; x[i] = mode == Mode::add ? 1 : 2; }
//: cxx17_enum_brace_cast | refuses <4.0 | braced_enums
enum class Mode : uint { add, multiply };
inline float run(Mode mode) { return mode == Mode::add ? 1 : 2; }
KERNEL { x[i] = run(Mode{1}); }
//: cxx17_enum | ok
enum class Mode : uint { add, multiply };
enum Plain { one = 1, two };
struct Options { Mode mode; enum : uint { count = 2 }; };
KERNEL { Options o = {Mode(i % 2)}; Mode m{}; x[i] = o.mode == m ? Plain::one : Options::count + two; }
//: cxx17_fold | ok
template <typename... A> float product(A... all) { return (all * ...); }
KERNEL { x[i] = product(x[i], 2.0f, 3.0f); }
//: cxx17_hexfloat | ? | accepted
KERNEL { x[i] = 0x1.4p3f * 0x1p-2; }
//: cxx17_if_constexpr | ok
template <typename T> float widened(T v) { if constexpr (sizeof(T) == 4) return v; else return float(v) + 1; }
KERNEL { x[i] = widened(x[i]) + widened(half(x[i])); }
//: cxx17_if_init | ok
KERNEL { if (const float v = x[i]; v < 0) x[i] = -v; }
//: cxx17_inline_var | ok
inline constant constexpr uint kRows = 8;
KERNEL { x[i] = i % kRows; }
//: cxx17_nested_ns | ok
namespace ops::detail { inline float twice(float v) { return 2 * v; } }
KERNEL { x[i] = ops::detail::twice(x[i]); }
//: cxx17_static_assert | ok
KERNEL { static_assert(sizeof(half4) == 8); x[i] = 8; }
//: cxx17_static_constexpr_member_odr | refuses <4.0 | accepted | it is the linker that misses the member, and the front end's members are inline
struct Tile { static constant constexpr uint rows = 8; };
inline uint twice(constant const uint& n) { return 2 * n; }
KERNEL { x[i] = twice(Tile::rows); }
//: cxx17_structured | ok
struct Range { uint first, count; };
KERNEL { Range r = {i, 2}; auto [first, count] = r; x[i] = first + count; }
//: cxx17_tmpl_auto | refuses <4.0 | auto_template_parameters
template <auto Scale> float scaled(float v) { return v * Scale; }
KERNEL { x[i] = scaled<3>(x[i]); }
//: cxx17_variant_of_T | ? | accepted
KERNEL { x[i] = is_same_v<uint, decltype(i)> ? 2 : 3; }
//: cxx20_abbrev | refuses | address_spaces
inline auto twice(auto v) { return v + v; }
KERNEL { x[i] = twice(x[i]); }
//: cxx20_constexpr_uninit | refuses | newer_language
constexpr uint power(uint n) { uint p; p = 1; while (n--) p *= 2; return p; }
KERNEL { x[i] = power(3); }
//: cxx14_constexpr | ok
constexpr uint power(uint n) { uint p = 1; while (n--) p *= 2; return p; }
KERNEL { float v[power(2)] = {}; x[i] = v[i % power(2)]; }
//: cxx20_constinit | refuses | words
constinit constant uint kRows = 8;
KERNEL { x[i] = i % kRows; }
//: cxx20_designated | ok
struct Range { uint first, count; };
KERNEL { Range r = {.first = i, .count = 2}; x[i] = r.first + r.count; }
//: cxx20_default_init | ok
struct Options { float scale = 2; uint repeat = 1; };
KERNEL { Options o{.scale = 3}, p, q = {1, 2}; x[i] = o.scale * p.repeat + q.scale; }
//: cxx20_nttp_class | refuses | address_spaces
struct Shape { uint rows; };
template <Shape S> float rows() { return S.rows; }
KERNEL { x[i] = rows<Shape{4}>(); }
//: cxx20_nttp_float | refuses | address_spaces
template <float Scale> float scaled(float v) { return v * Scale; }
KERNEL { x[i] = scaled<0.5f>(x[i]); }
//: cxx20_paren_agg | refuses | address_spaces
struct Range { uint first, count; };
KERNEL { Range r(i, 2); x[i] = r.count; }
//: cxx20_paren_agg_cast | refuses | address_spaces
struct Range { uint first, count; };
KERNEL { x[i] = Range(i, 2).count; }
//: cxx20_range_for_init | ok
KERNEL { float v[3] = {1, 2, 3}, sum = 0; for (const float scale = x[i]; const float e : v) sum += scale * e; x[i] = sum; }
//: cxx20_using_enum | refuses | using_enum
enum class Mode : uint { add, multiply };
KERNEL { using enum Mode; x[i] = i % 2 == uint(add) ? 1 : 2; }
//: cxx23_auto_cast | refuses | engine
KERNEL { x[i] = auto(x[i] + 1); }
//: cxx23_elifdef | refuses | translation
KERNEL { float v = 0;
#ifdef NOT_DEFINED
  v = 1;
#elifdef __METAL_VERSION__
  v = 2;
#endif
  x[i] = v; }
//: cxx23_va_opt | ? | accepted
#define SUM(first, ...) (first __VA_OPT__(+) __VA_ARGS__)
KERNEL { x[i] = SUM(1) + SUM(2, 3); }
//: cxx26_pack_index | refuses | lambdas
template <typename... A> float last(A... all) { return all...[sizeof...(A) - 1]; }
KERNEL { x[i] = last(1.0f, 2.0f); }
//: cxx_range_for | ok
KERNEL { float v[3] = {1, 2, 3}, sum = 0; for (float e : v) sum += e; x[i] = sum; }
//: lang_Float16 | refuses | words
KERNEL { x[i] = float(_Float16(x[i])); }
//: lang_alloca | refuses | builtin_functions
KERNEL { thread uint* n = (thread uint*)__builtin_alloca(8); n[0] = i; x[i] = n[0]; }
//: lang_bitfield | ? | accepted
struct Flags { uint kind : 3; uint rest : 29; };
KERNEL { Flags f; f.kind = i; x[i] = f.kind; }
//: lang_comment_not_ascii | ok
// 10 µs, on a Mac « in a comment »
KERNEL { x[i] = 1; /* größer */ }
//: lang_extern | refuses | address_spaces
extern uint kRows;
KERNEL { x[i] = 1; }
//: lang_deleted | ok
struct Fixed { float v; Fixed(float first) : v(first) {} void operator+=(float) = delete; };
KERNEL { Fixed f(x[i]); x[i] = f.v; }
//: lang_fn_template_param | ok
inline float twice(float v) { return 2 * v; }
inline float square(float v) { return v * v; }
template <float (*f)(float)> void apply(device float* v) { *v = f(*v); }
KERNEL { apply<twice>(x + i); apply<square>(x + i); }
//: lang_functor | ok
struct Twice { float operator()(float v) const { return 2 * v; } };
template <typename F> void apply(device float* v, F f) { *v = f(*v); }
KERNEL { apply(x + i, Twice()); }
//: lang_fnptr | refuses | function_pointers
inline float twice(float v) { return 2 * v; }
KERNEL { float (*f)(float) = twice; x[i] = f(x[i]); }
//: lang_fnptr_param | refuses | function_pointers
inline float twice(float v) { return 2 * v; }
inline float apply(float (&f)(float), float v) { return f(v); }
KERNEL { x[i] = apply(twice, x[i]); }
//: lang_int128 | refuses | words
KERNEL { __int128 n = i; x[i] = float(n); }
//: lang_kernel_call | refuses | calls_of_kernels
kernel void clear(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 0; }
kernel void clear_twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { clear(x, i); clear(x, i + 1); }
//: lang_kernel_template_call | refuses | calls_of_kernels
template <typename T> [[kernel]] void clear(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = T(0); }
KERNEL { clear<float>(x, i); }
//: lang_kernel_default | refuses | default_arguments_of_kernels
kernel void k(device float* x [[buffer(0)]], uint lane [[thread_index_in_simdgroup]] = 0) { x[lane] = 0; }
//: lang_kernel_inline | ? | accepted
inline kernel void k(device float* x [[buffer(0)]]) { x[0] = 2; }
//: lang_kernel_member | ? | static_kernels
struct Ops { [[host_name("clear")]] static kernel void clear(device float* x [[buffer(0)]]) { x[0] = 0; } };
//: lang_kernel_overload | refuses | translation
kernel void clear(device half* x [[buffer(0)]]) { x[0] = 0; }
kernel void clear(device float* x [[buffer(0)]]) { x[0] = 0; }
//: lang_kernel_static | refuses | static_kernels
static kernel void k(device float* x [[buffer(0)]]) { x[0] = 2; }
//: lang_longlong | refuses | long_long
KERNEL { unsigned long long n = i; x[i] = float(n); }
//: lang_ull_literal | refuses | long_long
KERNEL { x[i] = float(3ull * i); }
//: lang_ul_literal | ok
KERNEL { x[i] = float((3ul * i) >> 1u) + 0x10UL + 7L + 1e3f; }
//: lang_main | refuses | main_function
inline float main(float v) { return 2 * v; }
KERNEL { x[i] = main(x[i]); }
//: lang_memfnptr | refuses | member_pointers
struct Cell { float v; float twice() { return 2 * v; } };
KERNEL { Cell c = {x[i]}; auto f = &Cell::twice; x[i] = (c.*f)(); }
//: lang_missing_return | ok | accepted | Apple warns; the engine sees it at run time: rule `arithmetic`
inline float positive(float v) { if (v > 0) return v; }
KERNEL { x[i] = positive(x[i]); }
//: lang_narrowing | refuses | engine
struct Range { int first; uint count; };
KERNEL { uint n = i + 1; Range r = {n, 2}; x[i] = r.first; }
//: lang_narrowing_float | refuses | engine
struct Line { float a, b; };
KERNEL { Line l = {x[i], i}; x[i] = l.b; }
//: lang_narrowing_long | refuses | engine
KERNEL { ulong all = ulong(i) * i; uint low{all}; x[i] = low; }
//: lang_narrowing_return | refuses | address_spaces
struct Range { int first; uint count; };
inline Range range(uint n) { return {n, n}; }
KERNEL { x[i] = range(i).first; }
//: lang_no_narrowing | ok
struct Line { float a, b; half h; int n; };
KERNEL { Line l = {1, 2.5f, half(x[i]), int(i)}; const float v[3] = {0, 1, float(i)}; x[i] = l.b + v[1]; }
//: lang_noexcept | refuses | noexcept
inline float twice(float v) noexcept { return 2 * v; }
KERNEL { x[i] = twice(x[i]); }
//: lang_noexcept_op | refuses | noexcept
inline float twice(float v) { return 2 * v; }
KERNEL { x[i] = noexcept(twice(1)) ? 1 : 2; }
//: lang_register | refuses | words
KERNEL { register uint n = i; x[i] = n; }
//: lang_static_const_local | ? | address_spaces
KERNEL { static const uint width = 4; x[i] = i % width; }
//: lang_static_local | refuses | address_spaces
KERNEL { static uint calls = 0; x[i] = ++calls; }
//: lang_string | refuses | address_spaces
KERNEL { constant char* name = "metal"; x[i] = name[i % 5]; }
//: lang_string_thread | refuses | address_spaces
KERNEL { thread const char* name = "metal"; x[i] = name[i % 5]; }
//: lang_two_phase | refuses | engine
template <typename T> T never_called(T v) { return v + nobody_declared_this(2); }
KERNEL { x[i] = 1; }
//: lang_typename_missing | refuses | newer_language
struct Traits { using Sum = float; };
template <typename A> A::Sum zero() { return 0; }
KERNEL { x[i] = zero<Traits>(); }
//: lang_typename_missing_alias | refuses | newer_language
struct Traits { using Sum = float; };
template <typename A> struct Twice { using Sum = A::Sum; };
KERNEL { Twice<Traits>::Sum sum = x[i]; x[i] = 2 * sum; }
//: lang_uninst_kernel_err | refuses | engine
template <typename T> [[kernel]] void never(device T* x [[buffer(0)]]) { x[0] = nobody_declared_this; }
KERNEL { x[i] = 1; }
//: lang_union_ok | ok
KERNEL { union { float f; uint n; } word; word.f = x[i]; x[i] = word.n >> 23; }
//: lang_variadic_c | refuses | address_spaces
inline float first(float v, ...) { return v; }
KERNEL { x[i] = first(x[i], 1); }
//: lang_vla | refuses | address_spaces
KERNEL { uint n = i % 4 + 1; float v[n]; v[0] = 2; x[i] = v[0]; }
//: lang_wchar | ? | accepted
KERNEL { wchar_t letter = 97; x[i] = letter; }
