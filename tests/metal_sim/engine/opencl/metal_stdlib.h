// metal_stdlib for clang's C++ for OpenCL: declarations only, just enough to check address spaces.
// ../shim checks the types of arguments; here most functions take anything. bfloat is char16_t, a built-in type of the
// same size that shaders do not use.
#pragma once
#pragma clang system_header  // no warnings about this file

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_bitfields : enable
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char16_t bfloat;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;

#define MSL_VECTORS(T, E)                               \
  typedef E T##2 __attribute__((ext_vector_type(2)));   \
  typedef E T##3 __attribute__((ext_vector_type(3)));   \
  typedef E T##4 __attribute__((ext_vector_type(4)));   \
  typedef T##2 packed_##T##2;                           \
  typedef T##3 packed_##T##3;                           \
  typedef T##4 packed_##T##4;
MSL_VECTORS(bool, int)
MSL_VECTORS(char, char)
MSL_VECTORS(uchar, uchar)
MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort)
MSL_VECTORS(int, int)
MSL_VECTORS(uint, uint)
MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong)
MSL_VECTORS(half, half)
MSL_VECTORS(bfloat, char16_t)
MSL_VECTORS(float, float)

// V(parts...) in Metal is translated to this. With constant arguments it is a constant.
template <class V>
struct msl_vector;
template <class T, int N>
struct msl_vector<T __attribute__((ext_vector_type(N)))> {
  using element = T;
};
template <class V, class... A>
V msl_convert(A... parts);
template <class V, class A>
constexpr V msl_splat(A value) {
  return (V)(static_cast<typename msl_vector<V>::element>(value));
}
template <class V, class... A>
constexpr V msl_make(A... parts) {
  if constexpr (sizeof...(A) == 0 || !(__is_arithmetic(A) && ...)) {
    return msl_convert<V>(parts...);
  } else if constexpr (sizeof...(A) == 1) {
    return msl_splat<V>(parts...);
  } else {
    return V{static_cast<typename msl_vector<V>::element>(parts)...};
  }
}

#define MSL_HALF(literal) literal##h
#define MSL_BFLOAT(literal) (bfloat)(literal##f)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282346638528859811704183484516925440e+38f
#define FLT_MAX MAXFLOAT
#define FLT_MIN 1.17549435082228750796873653722224568e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX ((half)65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define CHAR_BIT 8
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_E_F 2.71828182845904523536028747135266250f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517f

// Metal copies structs out of constant memory. C++ for OpenCL needs explicit constructors for that, because its generic
// pointers exclude constant memory. All are defaulted, so that the struct stays an aggregate; a struct that has
// constructors gets no default constructor.
#define MSL_PLAIN(S) S() = default;
#define MSL_DERIVED(S) constexpr S() {}  // C++14: a struct with a base is no aggregate
#define MSL_COPIED(S)     \
  S(const S&) = default;  \
  S(const constant S&) = default;
#define MSL_ASSIGNED(S)       \
  template <class MslSource>  \
  void operator=(const constant MslSource& source);

namespace metal {

using ::bfloat, ::uchar, ::uint, ::ulong, ::ushort;
#define MSL_HERE(T) using ::T##2, ::T##3, ::T##4, ::packed_##T##2, ::packed_##T##3, ::packed_##T##4;
MSL_HERE(bool)
MSL_HERE(char)
MSL_HERE(uchar)
MSL_HERE(short)
MSL_HERE(ushort)
MSL_HERE(int)
MSL_HERE(uint)
MSL_HERE(long)
MSL_HERE(ulong)
MSL_HERE(half)
MSL_HERE(bfloat)
MSL_HERE(float)

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, size_t N>
struct array {
  MSL_PLAIN(array)
  MSL_COPIED(array)
  MSL_ASSIGNED(array)
  thread T& operator[](size_t i) thread;
  device T& operator[](size_t i) device;
  threadgroup T& operator[](size_t i) threadgroup;
  const thread T& operator[](size_t i) const thread;
  const device T& operator[](size_t i) const device;
  const threadgroup T& operator[](size_t i) const threadgroup;
  const constant T& operator[](size_t i) const constant;
  constexpr size_t size() const { return N; }
  constexpr size_t size() const constant { return N; }
  T msl_at[N];
};

template <class A, class B>
constant constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same_type {
  static constant constexpr bool value = __is_same(A, B);
};
template <class T>
constant constexpr bool is_integral_v = __is_integral(T) && !__is_same(T, bfloat);
template <class T>
constant constexpr bool is_floating_point_v = __is_floating_point(T) || __is_same(T, bfloat);
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T, T v>
struct integral_constant {
  static constant constexpr T value = v;
};

template <class T>
struct numeric_limits {
  static constant constexpr int digits = 24;
  static constexpr T lowest() { return T(-1); }
  static constexpr T min() { return T(0); }
  static constexpr T max() { return T(1); }
  static constexpr T infinity() { return T(INFINITY); }
  static constexpr T quiet_NaN() { return T(NAN); }
  static constexpr T epsilon() { return T(1); }
};

template <class To, class From>
To as_type(From from);

#define MSL_1(name)   \
  template <class T>  \
  T name(T x);
#define MSL_2(name)            \
  template <class T, class U>  \
  T name(T x, U y);
#define MSL_3(name)                     \
  template <class T, class U, class V>  \
  T name(T x, U y, V z);
#define MSL_MATH                                                                                                    \
  MSL_1(exp) MSL_1(exp2) MSL_1(exp10) MSL_1(log) MSL_1(log2) MSL_1(log10) MSL_1(sqrt) MSL_1(rsqrt) MSL_1(sin)       \
  MSL_1(cos) MSL_1(tan) MSL_1(asin) MSL_1(acos) MSL_1(atan) MSL_1(sinh) MSL_1(cosh) MSL_1(tanh) MSL_1(asinh)        \
  MSL_1(acosh) MSL_1(atanh) MSL_1(floor) MSL_1(ceil) MSL_1(round) MSL_1(rint) MSL_1(trunc) MSL_1(fabs) MSL_1(fract) \
  MSL_1(saturate) MSL_1(sign) MSL_1(abs) MSL_2(pow) MSL_2(powr) MSL_2(atan2) MSL_2(fmod) MSL_2(copysign)            \
  MSL_2(fmin) MSL_2(fmax) MSL_2(divide) MSL_2(step) MSL_2(fdim) MSL_2(nextafter) MSL_2(min) MSL_2(max) MSL_3(fma) MSL_3(mix) MSL_3(clamp)
MSL_MATH
namespace precise {
MSL_MATH
}
namespace fast {
MSL_MATH
}
MSL_1(popcount) MSL_1(clz) MSL_1(ctz) MSL_1(reverse_bits) MSL_2(mulhi) MSL_2(absdiff) MSL_2(rotate) MSL_2(ldexp)
MSL_3(max3) MSL_3(min3) MSL_3(median3) MSL_3(extract_bits) MSL_3(select) MSL_1(normalize)

// The result of comparing vectors is a vector of int or a narrower type; all and any take it.
template <class T>
struct predicate {
  using type = bool;
};
template <class T, int N>
struct predicate<vec<T, N>> {
  using type = vec<int, N>;
};
#define MSL_PREDICATE(name) \
  template <class T>        \
  typename predicate<T>::type name(T x);
MSL_PREDICATE(isnan) MSL_PREDICATE(isinf) MSL_PREDICATE(isfinite) MSL_PREDICATE(isnormal) MSL_PREDICATE(signbit)
template <class T>
int ilogb(T x);
template <class T>
bool all(T x);
template <class T>
bool any(T x);
template <class T, int N>
T dot(vec<T, N> a, vec<T, N> b);
template <class T, int N>
T length(vec<T, N> v);
template <class T, int N>
T length_squared(vec<T, N> v);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define MSL_REDUCTIONS(prefix)                                                                           \
  MSL_1(prefix##_sum) MSL_1(prefix##_product) MSL_1(prefix##_max) MSL_1(prefix##_min) MSL_1(prefix##_and) \
  MSL_1(prefix##_or) MSL_1(prefix##_xor)
MSL_REDUCTIONS(simd)
MSL_REDUCTIONS(quad)
MSL_1(simd_prefix_exclusive_sum) MSL_1(simd_prefix_inclusive_sum) MSL_1(simd_prefix_exclusive_product)
MSL_1(simd_prefix_inclusive_product) MSL_2(simd_shuffle) MSL_2(simd_shuffle_xor) MSL_2(simd_shuffle_up)
MSL_2(simd_shuffle_down) MSL_2(simd_shuffle_rotate_up) MSL_2(simd_shuffle_rotate_down) MSL_2(simd_broadcast)
MSL_1(simd_broadcast_first) MSL_2(quad_shuffle_xor) MSL_2(quad_broadcast)
template <class T>
T simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo = 32);
template <class T>
T simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo = 32);
class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t bits) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  bool all() const;
  bool any() const;

 private:
  vote_t bits_;
};
simd_vote simd_ballot(bool value);
simd_vote simd_active_threads_mask();
bool simd_any(bool value);
bool simd_all(bool value);
bool simd_is_first();

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements();

  vec<T, 2> msl_at;
};
template <class T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b);
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value);
#define MSL_MATRIX_MEMORY(space)                                                                                    \
  template <class T>                                                                                                \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, space const T* source, ulong elements_per_row = 8,       \
                      ulong2 origin = 0, bool transpose = false);                                                   \
  template <class T>                                                                                                \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* to, ulong elements_per_row = 8, ulong2 origin = 0,     \
                       bool transpose = false);
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b);

// Names of atomics end in _: see `rename` in address_spaces.py.
enum memory_order { memory_order_relaxed = 0 };
template <class T>
struct atomic {
  T msl_value;
};
typedef atomic<int> atomic_int_;
typedef atomic<uint> atomic_uint_;
typedef atomic<ulong> atomic_ulong_;
typedef atomic<float> atomic_float_;
typedef atomic<bool> atomic_bool_;
template <class T>
struct same {
  typedef T type;
};
#define MSL_FETCH(space, name) \
  template <class T>           \
  T atomic_##name##_explicit_(volatile space atomic<T>* object, typename same<T>::type operand, memory_order order);
#define MSL_ATOMICS(space)                                                                                      \
  MSL_FETCH(space, fetch_add) MSL_FETCH(space, fetch_sub) MSL_FETCH(space, fetch_and) MSL_FETCH(space, fetch_or) \
  MSL_FETCH(space, fetch_xor) MSL_FETCH(space, fetch_min) MSL_FETCH(space, fetch_max) MSL_FETCH(space, exchange) \
  template <class T>                                                                                            \
  void atomic_store_explicit_(volatile space atomic<T>* object, typename same<T>::type value, memory_order order); \
  template <class T>                                                                                            \
  T atomic_load_explicit_(const volatile space atomic<T>* object, memory_order order);                           \
  template <class T>                                                                                            \
  bool atomic_compare_exchange_weak_explicit_(volatile space atomic<T>* object, thread T* expected,              \
                                             typename same<T>::type desired, memory_order success,              \
                                             memory_order failure);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
void atomic_max_explicit_(volatile device atomic<ulong>* object, ulong operand, memory_order order);
void atomic_min_explicit_(volatile device atomic<ulong>* object, ulong operand, memory_order order);

}  // namespace metal

// --- the words that translate.py writes

#define MSL_UNPAREN(...) __VA_ARGS__
#define MSL_KERNEL_BODY
#define MSL_FUNCTION auto
#define MSL_INSTANTIATE(...) template decltype(__VA_ARGS__) __VA_ARGS__;
#define MSL_KERNEL(...)
#define MSL_THREADGROUP(name, ordinal, extents, ...)                  \
  typedef __VA_ARGS__ msl_type_##ordinal MSL_UNPAREN extents;         \
  threadgroup msl_type_##ordinal& name = *(threadgroup msl_type_##ordinal*)0
// A value unknown to clang, so that it cannot be used where a constant is needed.
constant float msl_unknown = 0;
template <class T>
constexpr bool is_function_constant_defined(T) {
  return true;
}
#define MSL_UNSET_FUNCTION_CONSTANT(index, name, ...) constant __VA_ARGS__ name = static_cast<__VA_ARGS__>(msl_unknown);
