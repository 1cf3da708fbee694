// MSL's scalar and vector types. The back end's metal.h comes first: violation() and builtin_value() are its own.
#pragma once

#include "parameters.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;

// Upper half of a float. Arithmetic is done in float and rounded to nearest even after every operation.
// Conversions from float are explicit, and there are none to or from half: what compiles here compiles as Metal.
struct bfloat {
  bfloat() = default;
  explicit constexpr bfloat(float f) : bits(round_bits(__builtin_bit_cast(uint32_t, f))) {}
  template <class T>
    requires(__is_arithmetic(T) && !__is_same(T, half) && !__is_same(T, float))
  explicit constexpr bfloat(T value) : bfloat(float(value)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  operator half() const = delete;

  uint16_t bits;

 private:
  static constexpr uint16_t round_bits(uint32_t u) {
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16) | 0x40;  // NaN stays NaN
    return uint16_t((uint64_t(u) + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};
inline bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
inline bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
inline bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
inline bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
inline bfloat operator-(bfloat a) { return bfloat(-float(a)); }
inline bfloat& operator+=(bfloat& a, bfloat b) { return a = a + b; }
inline bfloat& operator-=(bfloat& a, bfloat b) { return a = a - b; }
inline bfloat& operator*=(bfloat& a, bfloat b) { return a = a * b; }
inline bfloat& operator/=(bfloat& a, bfloat b) { return a = a / b; }

namespace metal {

using ::bfloat, ::half, ::uchar, ::uint, ::ulong, ::ushort;

template <class T>
inline constexpr bool is_scalar_v = __is_arithmetic(T) || __is_same(T, half) || __is_same(T, bfloat);

template <class T, int N>
struct vec;
template <class V, int... I>
struct swizzle_ref;

template <class T>
struct lanes_of {
  static constexpr int count = 1;
  using element = T;
};
template <class T, int N>
struct lanes_of<vec<T, N>> {
  static constexpr int count = N;
  using element = T;
};
template <class T>
using identity_t = typename lanes_of<vec<T, 2>>::element;  // not deduced

template <class T, int N, class... A>
constexpr void fill(T* out, const A&... parts) {
  int at = 0;
  auto put = [&]<class P>(const P& part) {
    if constexpr (lanes_of<P>::count == 1) {
      out[at++] = T(part);
    } else {
      for (int i = 0; i < lanes_of<P>::count; ++i) out[at++] = T(part.element_at(i));
    }
  };
  (put(parts), ...);
}

#define MSL_VEC_BODY(N)                                                              \
  vec() = default;                                                                   \
  constexpr vec(T s) {                                                               \
    for (int i = 0; i < N; ++i) set(i, s);                                           \
  }                                                                                  \
  template <class U>                                                                 \
    requires(!__is_same(U, T))                                                       \
  explicit constexpr vec(const vec<U, N>& o) {                                       \
    for (int i = 0; i < N; ++i) set(i, T(o.element_at(i)));                          \
  }                                                                                  \
  template <class... A>                                                              \
    requires(sizeof...(A) >= 2 && (lanes_of<A>::count + ...) == N)                   \
  constexpr vec(const A&... parts) {                                                 \
    T all[N];                                                                        \
    fill<T, N>(all, parts...);                                                       \
    for (int i = 0; i < N; ++i) set(i, all[i]);                                      \
  }                                                                                  \
  template <class I>                                                                 \
  T& operator[](I i) {                                                               \
    if (uint64_t(i) >= N) ::msl::violation("stack", "vector index beyond its size"); \
    return (&x)[i];                                                                  \
  }                                                                                  \
  template <class I>                                                                 \
  const T& operator[](I i) const {                                                   \
    if (uint64_t(i) >= N) ::msl::violation("stack", "vector index beyond its size"); \
    return (&x)[i];                                                                  \
  }                                                                                  \
  template <int... I>                                                                \
  constexpr vec<T, sizeof...(I)> swizzle() const {                                   \
    return vec<T, sizeof...(I)>(element_at(I)...);                                   \
  }                                                                                  \
  template <int... I>                                                                \
  swizzle_ref<vec, I...> swizzle_of() {                                              \
    return {*this};                                                                  \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  constexpr T element_at(int i) const { return i == 0 ? x : y; }
  constexpr void set(int i, T v) { (i == 0 ? x : y) = v; }
  MSL_VEC_BODY(2)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  constexpr T element_at(int i) const { return i == 0 ? x : i == 1 ? y : z; }
  constexpr void set(int i, T v) { (i == 0 ? x : i == 1 ? y : z) = v; }
  MSL_VEC_BODY(3)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  constexpr T element_at(int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  constexpr void set(int i, T v) { (i == 0 ? x : i == 1 ? y : i == 2 ? z : w) = v; }
  MSL_VEC_BODY(4)
};
#undef MSL_VEC_BODY

template <class V, int... I>
struct swizzle_ref {
  V& v;
  using value = vec<typename lanes_of<V>::element, sizeof...(I)>;
  void operator=(value o) {
    int at = 0;
    (v.set(I, o.element_at(at++)), ...);
  }
  value get() const { return v.template swizzle<I...>(); }
  void operator+=(value o) { *this = get() + o; }
  void operator-=(value o) { *this = get() - o; }
  void operator*=(value o) { *this = get() * o; }
  void operator/=(value o) { *this = get() / o; }
};

template <class T, int N, class F>
constexpr auto each(vec<T, N> a, F f) {
  vec<decltype(f(T())), N> r;
  for (int i = 0; i < N; ++i) r.set(i, f(a.element_at(i)));
  return r;
}
template <class T, int N, class F>
constexpr auto each(vec<T, N> a, vec<T, N> b, F f) {
  vec<decltype(f(T(), T())), N> r;
  for (int i = 0; i < N; ++i) r.set(i, f(a.element_at(i), b.element_at(i)));
  return r;
}

#define MSL_BINARY(op)                                                 \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {          \
    return each(a, b, [](T p, T q) { return T(p op q); });             \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(vec<T, N> a, identity_t<T> b) {      \
    return a op vec<T, N>(b);                                          \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(identity_t<T> a, vec<T, N> b) {      \
    return vec<T, N>(a) op b;                                          \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) {     \
    return a = a op b;                                                 \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, identity_t<T> b) { \
    return a = a op b;                                                 \
  }
MSL_BINARY(+)
MSL_BINARY(-)
MSL_BINARY(*)
MSL_BINARY(/)
MSL_BINARY(%)
MSL_BINARY(&)
MSL_BINARY(|)
MSL_BINARY(^)
MSL_BINARY(<<)
MSL_BINARY(>>)
#undef MSL_BINARY
#define MSL_COMPARE(op)                                              \
  template <class T, int N>                                          \
  constexpr vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) {     \
    return each(a, b, [](T p, T q) { return p op q; });              \
  }                                                                  \
  template <class T, int N>                                          \
  constexpr vec<bool, N> operator op(vec<T, N> a, identity_t<T> b) { \
    return a op vec<T, N>(b);                                        \
  }                                                                  \
  template <class T, int N>                                          \
  constexpr vec<bool, N> operator op(identity_t<T> a, vec<T, N> b) { \
    return vec<T, N>(a) op b;                                        \
  }
MSL_COMPARE(==)
MSL_COMPARE(!=)
MSL_COMPARE(<)
MSL_COMPARE(>)
MSL_COMPARE(<=)
MSL_COMPARE(>=)
MSL_COMPARE(&&)
MSL_COMPARE(||)
#undef MSL_COMPARE
template <class T, int N>
constexpr vec<T, N> operator-(vec<T, N> a) {
  return each(a, [](T p) { return T(-p); });
}
template <class T, int N>
constexpr vec<T, N> operator~(vec<T, N> a) {
  return each(a, [](T p) { return T(~p); });
}
template <class T, int N>
constexpr vec<bool, N> operator!(vec<T, N> a) {
  return each(a, [](T p) { return !p; });
}

// Vectors without the padding and alignment of vec.
template <class T, int N>
struct packed_vec {
  T at[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; ++i) at[i] = v.element_at(i);
  }
  template <class... A>
    requires(sizeof...(A) == N)
  packed_vec(A... parts) : at{T(parts)...} {}
  operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; ++i) v.set(i, at[i]);
    return v;
  }
  T& operator[](uint i) { return at[i]; }
  const T& operator[](uint i) const { return at[i]; }
};

template <class T, size_t N>
struct array {
  T at[N];
  T& operator[](size_t i) { return at[i]; }
  const T& operator[](size_t i) const { return at[i]; }
  constexpr size_t size() const { return N; }
};

}  // namespace metal

#define MSL_VECTORS(T)                                     \
  using T##2 = metal::vec<T, 2>;                           \
  using T##3 = metal::vec<T, 3>;                           \
  using T##4 = metal::vec<T, 4>;                           \
  using packed_##T##2 = metal::packed_vec<T, 2>;           \
  using packed_##T##3 = metal::packed_vec<T, 3>;           \
  using packed_##T##4 = metal::packed_vec<T, 4>;           \
  namespace metal {                                        \
  using ::T##2, ::T##3, ::T##4;                            \
  using ::packed_##T##2, ::packed_##T##3, ::packed_##T##4; \
  }
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

#define MSL_HALF(literal) literal##f16
#define MSL_BFLOAT(literal) bfloat(literal##f)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.40282346638528859811704183484516925440e+38f
#define FLT_MAX MAXFLOAT
#define FLT_MIN 1.17549435082228750796873653722224568e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX half(65504.0f)
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

namespace msl {

template <class P>
  requires(metal::is_scalar_v<P>)
struct Bind<P> {
  template <Builtin B>
  static P from(BuiltinArgument<B>) {
    return P(builtin_value(B).value[0]);
  }
};
template <class T, int N>
struct Bind<metal::vec<T, N>> {
  template <Builtin B>
  static metal::vec<T, N> from(BuiltinArgument<B>) {
    static_assert(is_triple(B), "this attribute is a scalar");
    Triple t = builtin_value(B);
    metal::vec<T, N> v;
    for (int i = 0; i < N; ++i) v.set(i, T(t.value[i]));
    return v;
  }
};

}  // namespace msl
