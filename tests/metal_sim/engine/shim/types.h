// MSL's scalar and vector types. The back end's metal.h comes first: violation() and builtin_value() are its own.
#pragma once

#include "parameters.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;

// Upper half of a float. Arithmetic is done in float and rounded to nearest even after every operation.
// Conversions from float are explicit, and there are none to or from half, as in Metal.
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
// Mixed with a float, the result is a float; mixing with half is not allowed.
#define MSL_BFLOAT_MIXED(result, op)                                     \
  inline result operator op(bfloat a, float b) { return float(a) op b; } \
  inline result operator op(float a, bfloat b) { return a op float(b); } \
  void operator op(bfloat, half) = delete;                               \
  void operator op(half, bfloat) = delete;
#define MSL_BFLOAT_COMPARE(op)                                                 \
  inline bool operator op(bfloat a, bfloat b) { return float(a) op float(b); } \
  MSL_BFLOAT_MIXED(bool, op)
MSL_BFLOAT_MIXED(float, +)
MSL_BFLOAT_MIXED(float, -)
MSL_BFLOAT_MIXED(float, *)
MSL_BFLOAT_MIXED(float, /)
MSL_BFLOAT_COMPARE(==)
MSL_BFLOAT_COMPARE(!=)
MSL_BFLOAT_COMPARE(<)
MSL_BFLOAT_COMPARE(>)
MSL_BFLOAT_COMPARE(<=)
MSL_BFLOAT_COMPARE(>=)
#undef MSL_BFLOAT_COMPARE
#undef MSL_BFLOAT_MIXED

namespace metal {

using ::bfloat, ::half, ::uchar, ::uint, ::ulong, ::ushort;

template <class T>
inline constexpr bool msl_is_scalar = __is_arithmetic(T) || __is_same(T, half) || __is_same(T, bfloat);

template <class T, int N>
struct vec;
template <class V, int... I>
struct msl_swizzle_ref;

template <class T>
struct msl_lanes {
  static constexpr int count = 1;
  using element = T;
};
template <class T, int N>
struct msl_lanes<vec<T, N>> {
  static constexpr int count = N;
  using element = T;
};
template <class T>
using msl_same_t = typename msl_lanes<vec<T, 2>>::element;  // not deduced

template <class T, int N, class... A>
constexpr void msl_fill(T* out, const A&... parts) {
  int at = 0;
  auto put = [&]<class P>(const P& part) {
    if constexpr (msl_lanes<P>::count == 1) {
      out[at++] = T(part);
    } else {
      for (int i = 0; i < msl_lanes<P>::count; ++i) out[at++] = T(part.msl_get(i));
    }
  };
  (put(parts), ...);
}

#define MSL_VEC_BODY(N)                                                              \
  vec() = default;                                                                   \
  constexpr vec(T s) {                                                               \
    for (int i = 0; i < N; ++i) msl_set(i, s);                                       \
  }                                                                                  \
  template <class U>                                                                 \
    requires(!__is_same(U, T))                                                       \
  explicit constexpr vec(const vec<U, N>& o) {                                       \
    for (int i = 0; i < N; ++i) msl_set(i, T(o.msl_get(i)));                         \
  }                                                                                  \
  template <class... A>                                                              \
    requires(sizeof...(A) >= 2 && (msl_lanes<A>::count + ...) == N)                  \
  constexpr vec(const A&... parts) {                                                 \
    T all[N];                                                                        \
    msl_fill<T, N>(all, parts...);                                                   \
    for (int i = 0; i < N; ++i) msl_set(i, all[i]);                                  \
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
  constexpr vec<T, sizeof...(I)> msl_swizzle() const {                               \
    return vec<T, sizeof...(I)>(msl_get(I)...);                                      \
  }                                                                                  \
  template <int... I>                                                                \
  msl_swizzle_ref<vec, I...> msl_swizzle_of() {                                      \
    return {*this};                                                                  \
  }

// One element, two names.
#define MSL_NAMES(position, color) \
  union {                          \
    T position;                    \
    T color;                       \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  MSL_NAMES(x, r);
  MSL_NAMES(y, g);
  constexpr T msl_get(int i) const { return i == 0 ? x : y; }
  constexpr void msl_set(int i, T v) {
    if (i == 0) x = v;
    if (i == 1) y = v;
  }
  MSL_VEC_BODY(2)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  MSL_NAMES(x, r);
  MSL_NAMES(y, g);
  MSL_NAMES(z, b);
  constexpr T msl_get(int i) const { return i == 0 ? x : i == 1 ? y : z; }
  constexpr void msl_set(int i, T v) {
    if (i == 0) x = v;
    if (i == 1) y = v;
    if (i == 2) z = v;
  }
  MSL_VEC_BODY(3)
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  MSL_NAMES(x, r);
  MSL_NAMES(y, g);
  MSL_NAMES(z, b);
  MSL_NAMES(w, a);
  constexpr T msl_get(int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  constexpr void msl_set(int i, T v) {
    if (i == 0) x = v;
    if (i == 1) y = v;
    if (i == 2) z = v;
    if (i == 3) w = v;
  }
  MSL_VEC_BODY(4)
};
#undef MSL_VEC_BODY
#undef MSL_NAMES

template <class V, int... I>
struct msl_swizzle_ref {
  V& v;
  using value = vec<typename msl_lanes<V>::element, sizeof...(I)>;
  void operator=(value o) {
    int at = 0;
    (v.msl_set(I, o.msl_get(at++)), ...);
  }
  value get() const { return v.template msl_swizzle<I...>(); }
  void operator+=(value o) { *this = get() + o; }
  void operator-=(value o) { *this = get() - o; }
  void operator*=(value o) { *this = get() * o; }
  void operator/=(value o) { *this = get() / o; }
};

template <class T, int N, class F>
constexpr auto msl_each(vec<T, N> a, F f) {
  vec<decltype(f(T())), N> r;
  for (int i = 0; i < N; ++i) r.msl_set(i, f(a.msl_get(i)));
  return r;
}
template <class T, int N, class F>
constexpr auto msl_each(vec<T, N> a, vec<T, N> b, F f) {
  vec<decltype(f(T(), T())), N> r;
  for (int i = 0; i < N; ++i) r.msl_set(i, f(a.msl_get(i), b.msl_get(i)));
  return r;
}

#define MSL_BINARY(op)                                                 \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {          \
    return msl_each(a, b, [](T p, T q) { return T(p op q); });         \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(vec<T, N> a, msl_same_t<T> b) {      \
    return a op vec<T, N>(b);                                          \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N> operator op(msl_same_t<T> a, vec<T, N> b) {      \
    return vec<T, N>(a) op b;                                          \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) {     \
    return a = a op b;                                                 \
  }                                                                    \
  template <class T, int N>                                            \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, msl_same_t<T> b) { \
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
    return msl_each(a, b, [](T p, T q) { return p op q; });          \
  }                                                                  \
  template <class T, int N>                                          \
  constexpr vec<bool, N> operator op(vec<T, N> a, msl_same_t<T> b) { \
    return a op vec<T, N>(b);                                        \
  }                                                                  \
  template <class T, int N>                                          \
  constexpr vec<bool, N> operator op(msl_same_t<T> a, vec<T, N> b) { \
    return vec<T, N>(a) op b;                                        \
  }
MSL_COMPARE(==)
MSL_COMPARE(!=)
MSL_COMPARE(<)
MSL_COMPARE(>)
MSL_COMPARE(<=)
MSL_COMPARE(>=)
#undef MSL_COMPARE
template <int N>
constexpr vec<bool, N> operator&&(vec<bool, N> a, vec<bool, N> b) {
  return a & b;
}
template <int N>
constexpr vec<bool, N> operator||(vec<bool, N> a, vec<bool, N> b) {
  return a | b;
}
template <class T, int N>
constexpr vec<T, N> operator-(vec<T, N> a) {
  static_assert(!__is_same(T, bool), "there is no - of a vector of bool");
  return msl_each(a, [](T p) { return T(-p); });
}
template <class T, int N>
constexpr vec<T, N>& operator++(vec<T, N>& a) {
  return a += T(1);
}
template <class T, int N>
constexpr vec<T, N>& operator--(vec<T, N>& a) {
  return a -= T(1);
}
template <class T, int N>
constexpr vec<T, N> operator++(vec<T, N>& a, int) {
  vec<T, N> old = a;
  ++a;
  return old;
}
template <class T, int N>
constexpr vec<T, N> operator--(vec<T, N>& a, int) {
  vec<T, N> old = a;
  --a;
  return old;
}
template <class T, int N>
constexpr vec<T, N> operator~(vec<T, N> a) {
  return msl_each(a, [](T p) { return T(~p); });
}
template <class T, int N>
constexpr vec<bool, N> operator!(vec<T, N> a) {
  return msl_each(a, [](T p) { return !p; });
}

// Vectors without the padding and alignment of vec, with the same arithmetic.
template <class T, int N>
struct packed_vec;
#define MSL_PACKED(N, ...)                                      \
  template <class T>                                            \
  struct packed_vec<T, N> {                                     \
    T __VA_ARGS__;                                              \
    packed_vec() = default;                                     \
    packed_vec(T s) : packed_vec(vec<T, N>(s)) {}               \
    packed_vec(vec<T, N> v) {                                   \
      for (int i = 0; i < N; ++i) (&x)[i] = v.msl_get(i);       \
    }                                                           \
    template <class... A>                                       \
      requires(sizeof...(A) >= 2)                               \
    packed_vec(A... parts) : packed_vec(vec<T, N>(parts...)) {} \
    operator vec<T, N>() const {                                \
      vec<T, N> v;                                              \
      for (int i = 0; i < N; ++i) v.msl_set(i, (&x)[i]);        \
      return v;                                                 \
    }                                                           \
    template <int... I>                                         \
    vec<T, sizeof...(I)> msl_swizzle() const {                  \
      return vec<T, N>(*this).template msl_swizzle<I...>();     \
    }                                                           \
    T& operator[](uint i) { return (&x)[i]; }                   \
    const T& operator[](uint i) const { return (&x)[i]; }       \
  };
MSL_PACKED(2, x, y)
MSL_PACKED(3, x, y, z)
MSL_PACKED(4, x, y, z, w)
#undef MSL_PACKED
#define MSL_PACKED_BINARY(op)                                     \
  template <class T, int N>                                       \
  vec<T, N> operator op(packed_vec<T, N> a, packed_vec<T, N> b) { \
    return vec<T, N>(a) op vec<T, N>(b);                          \
  }                                                               \
  template <class T, int N>                                       \
  vec<T, N> operator op(packed_vec<T, N> a, vec<T, N> b) {        \
    return vec<T, N>(a) op b;                                     \
  }                                                               \
  template <class T, int N>                                       \
  vec<T, N> operator op(vec<T, N> a, packed_vec<T, N> b) {        \
    return a op vec<T, N>(b);                                     \
  }                                                               \
  template <class T, int N>                                       \
  vec<T, N> operator op(packed_vec<T, N> a, msl_same_t<T> b) {    \
    return vec<T, N>(a) op b;                                     \
  }                                                               \
  template <class T, int N>                                       \
  vec<T, N> operator op(msl_same_t<T> a, packed_vec<T, N> b) {    \
    return a op vec<T, N>(b);                                     \
  }                                                               \
  template <class T, int N, class B>                              \
  packed_vec<T, N>& operator op##=(packed_vec<T, N>& a, B b) {    \
    return a = a op b;                                            \
  }
MSL_PACKED_BINARY(+)
MSL_PACKED_BINARY(-)
MSL_PACKED_BINARY(*)
MSL_PACKED_BINARY(/)
#undef MSL_PACKED_BINARY

template <class T, size_t N>
struct array {
  T msl_at[N];
  constexpr T& operator[](size_t i) { return msl_at[i]; }
  constexpr const T& operator[](size_t i) const { return msl_at[i]; }
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

#define MSL_FUNCTION_CONSTANT(name, value, ...) static const __VA_ARGS__ name = static_cast<__VA_ARGS__>(value);
#define MSL_UNSET_FUNCTION_CONSTANT(index, name, ...)                                     \
  static const ::msl::UnsetFunctionConstant<__VA_ARGS__> name{"function constant '" #name \
                                                              "' [[function_constant(" #index ")]] has no value"};
namespace msl {
template <class T>
struct UnsetFunctionConstant {
  const char* message;
  operator T() const {
    unset(message);
    return T();
  }
};
}  // namespace msl
namespace metal {
template <class T>
constexpr bool is_function_constant_defined(const T&) {
  return true;
}
template <class T>
constexpr bool is_function_constant_defined(const ::msl::UnsetFunctionConstant<T>&) {
  return false;
}
}  // namespace metal

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

template <class T>
inline constexpr bool is_position = __is_same(T, uint) || __is_same(T, ushort);
#define MSL_POSITION "positions and counts of threads are ushort or uint, or vectors of two or three of them"

template <class P>
  requires(metal::msl_is_scalar<P>)
struct Bind<P> {
  template <Builtin B>
  static P from(BuiltinArgument<B>) {
    static_assert(is_position<P>, MSL_POSITION);
    return P(builtin_value(B).value[0]);
  }
};
template <class T, int N>
struct Bind<metal::vec<T, N>> {
  template <Builtin B>
  static metal::vec<T, N> from(BuiltinArgument<B>) {
    static_assert(is_triple(B), "this attribute is a scalar");
    static_assert(is_position<T> && N <= 3, MSL_POSITION);
    Triple t = builtin_value(B);
    metal::vec<T, N> v;
    for (int i = 0; i < N; ++i) v.msl_set(i, T(t.value[i]));
    return v;
  }
};

template <class P>
inline constexpr int lanes = metal::msl_lanes<P>::count;
template <class... P>
struct Parameters {
  template <class... A>
  static constexpr bool positions_agree() {
    int first = 0;
    bool agree = true;
    auto one = [&](bool position, int count) {
      if (!position) return;
      agree = agree && (first == 0 || first == count);
      first = count;
    };
    (one(A::is_position, lanes<P>), ...);
    return agree;
  }
  template <class... A>
  static constexpr bool indices_differ() {
    int all[] = {A::slot..., -1};
    for (size_t i = 0; i < sizeof...(A); ++i)
      for (size_t j = 0; j < i; ++j)
        if (all[i] >= 0 && all[i] == all[j]) return false;
    return true;
  }
};
template <class... P, class... A>
constexpr void check_parameters(void (*)(P...), A...) {
  static_assert(Parameters<P...>::template positions_agree<A...>(),
                "the positions and counts of a kernel must be all scalars, or all vectors of the same length");
  static_assert(Parameters<P...>::template indices_differ<A...>(), "two parameters of a kernel have the same index");
}

}  // namespace msl
