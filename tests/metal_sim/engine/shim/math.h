// MSL's functions of one thread: as_type, relational, common, integer and math functions.
#pragma once

#include "types.h"

namespace metal {

// A number, or a vector of numbers.
template <class T>
inline constexpr bool msl_is_plain = msl_is_scalar<T> && !__is_same(T, bool);
template <class T, int N>
inline constexpr bool msl_is_plain<vec<T, N>> = msl_is_plain<T>;

template <class T>
inline constexpr bool msl_is_half = __is_same(T, half);
template <int N>
inline constexpr bool msl_is_half<vec<half, N>> = true;
// Flushes subnormal halves to 0, as a GPU without them does.
template <class T>
T msl_flushed(T from) {
  struct Halves {
    ushort at[sizeof(T) / 2];
  } halves = __builtin_bit_cast(Halves, from);
  for (ushort& bits : halves.at) bits &= bits & 0x7c00 ? 0xffff : 0x8000;
  return __builtin_bit_cast(T, halves);
}

template <class To, class From>
To as_type(From from) {
  static_assert(msl_is_plain<To> && msl_is_plain<From>, "as_type takes numbers and vectors of them, no bool");
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  const To to = __builtin_bit_cast(To, from);
#ifdef MSL_FLUSH_HALF
  if constexpr (msl_is_half<To>) return msl_flushed(to);
#endif
  return to;
}

template <class A, class B>
struct is_same_type {
  static constexpr bool value = __is_same(A, B);
};
template <class A, class B>
inline constexpr bool is_same_v = __is_same(A, B);
template <class T>
inline constexpr bool is_floating_point_v = __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <class T>
inline constexpr bool is_integral_v = __is_integral(T);
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
  static constexpr T value = v;
  using value_type = T;
  constexpr operator T() const { return v; }
};

template <class T>
struct numeric_limits;
#define MSL_LIMITS(T, lowest_value, min_value, max_value, inf, nan, eps, digits_value) \
  template <>                                                                          \
  struct numeric_limits<T> {                                                           \
    static constexpr bool is_specialized = true;                                       \
    static constexpr int digits = digits_value;                                        \
    static constexpr T lowest() { return lowest_value; }                               \
    static constexpr T min() { return min_value; }                                     \
    static constexpr T max() { return max_value; }                                     \
    static constexpr T infinity() { return inf; }                                      \
    static constexpr T quiet_NaN() { return nan; }                                     \
    static constexpr T epsilon() { return eps; }                                       \
  };
MSL_LIMITS(float, -FLT_MAX, FLT_MIN, FLT_MAX, INFINITY, NAN, FLT_EPSILON, 24)
MSL_LIMITS(half, half(-65504.0f), half(6.103515625e-5f), half(65504.0f), half(INFINITY), half(NAN), half(9.765625e-4f),
           11)
MSL_LIMITS(bfloat, bfloat(-3.38953139e38f), bfloat(FLT_MIN), bfloat(3.38953139e38f), bfloat(INFINITY), bfloat(NAN),
           bfloat(7.8125e-3f), 8)
#define MSL_INT_LIMITS(T, lo, hi) \
  MSL_LIMITS(T, T(lo), T(lo), T(hi), T(0), T(0), T(0), (T(-1) < T(0) ? 8 * sizeof(T) - 1 : 8 * sizeof(T)))
MSL_INT_LIMITS(char, -128, 127)
MSL_INT_LIMITS(uchar, 0, 255)
MSL_INT_LIMITS(short, -32768, 32767)
MSL_INT_LIMITS(ushort, 0, 65535)
MSL_INT_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INT_LIMITS(uint, 0, 4294967295u)
MSL_INT_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
MSL_INT_LIMITS(ulong, 0, 18446744073709551615ul)
#undef MSL_INT_LIMITS
#undef MSL_LIMITS

// An overload for each type instead of one template: min(uint, int) is ambiguous in Metal and must be ambiguous here.
#define MSL_FLOAT_FUNCTION_1(name, expression)       \
  inline float name(float x) { return expression; }  \
  inline half name(half h) {                         \
    float x = h;                                     \
    return half(float(expression));                  \
  }                                                  \
  void name(bfloat) = delete;                        \
  template <class T, int N>                          \
  vec<T, N> name(vec<T, N> v) {                      \
    return msl_each(v, [](T e) { return name(e); }); \
  }
#define MSL_FLOAT_FUNCTION_2(name, expression)                  \
  inline float name(float x, float y) { return expression; }    \
  inline half name(half p, half q) {                            \
    float x = p, y = q;                                         \
    return half(float(expression));                             \
  }                                                             \
  void name(bfloat, bfloat) = delete;                           \
  template <class T, int N>                                     \
  vec<T, N> name(vec<T, N> a, vec<T, N> b) {                    \
    return msl_each(a, b, [](T p, T q) { return name(p, q); }); \
  }
#define MSL_FLOAT_FUNCTION_3(name, expression)                                                \
  inline float name(float x, float y, float z) { return expression; }                         \
  inline half name(half p, half q, half r) {                                                  \
    float x = p, y = q, z = r;                                                                \
    return half(float(expression));                                                           \
  }                                                                                           \
  void name(bfloat, bfloat, bfloat) = delete;                                                 \
  template <class T, int N>                                                                   \
  vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) {                                     \
    vec<T, N> r;                                                                              \
    for (int i = 0; i < N; ++i) r.msl_set(i, name(a.msl_get(i), b.msl_get(i), c.msl_get(i))); \
    return r;                                                                                 \
  }

#define MSL_FLOAT_ONLY_1(name, expression)               \
  inline float name(float x) { return expression; }      \
  void name(half) = delete;                              \
  void name(bfloat) = delete;                            \
  template <int N>                                       \
  vec<float, N> name(vec<float, N> v) {                  \
    return msl_each(v, [](float e) { return name(e); }); \
  }
#define MSL_FLOAT_ONLY_2(name, expression)                              \
  inline float name(float x, float y) { return expression; }            \
  void name(half, half) = delete;                                       \
  void name(bfloat, bfloat) = delete;                                   \
  template <int N>                                                      \
  vec<float, N> name(vec<float, N> a, vec<float, N> b) {                \
    return msl_each(a, b, [](float p, float q) { return name(p, q); }); \
  }

// F is MSL_FLOAT_FUNCTION, or MSL_FLOAT_ONLY for the variants in fast:: and precise::, which take floats.
#define MSL_VARIED_FUNCTIONS(F)                                                                                        \
  F##_1(exp, __builtin_expf(x)) F##_1(exp2, __builtin_exp2f(x)) F##_1(exp10, float(__builtin_pow(10.0, x)))            \
      F##_1(log, __builtin_logf(x)) F##_1(log2, __builtin_log2f(x)) F##_1(log10, __builtin_log10f(x)) F##_1(           \
          sqrt, __builtin_sqrtf(x)) F##_1(rsqrt, float(1.0 / __builtin_sqrt(double(x)))) F##_1(sin, __builtin_sinf(x)) \
          F##_1(cos, __builtin_cosf(x)) F##_1(tan, __builtin_tanf(x)) F##_1(asin, __builtin_asinf(x))                  \
              F##_1(acos, __builtin_acosf(x)) F##_1(atan, __builtin_atanf(x)) F##_1(sinh, __builtin_sinhf(x))          \
                  F##_1(cosh, __builtin_coshf(x)) F##_1(tanh, __builtin_tanhf(x)) F##_1(asinh, __builtin_asinhf(x))    \
                      F##_1(acosh, __builtin_acoshf(x)) F##_1(atanh, __builtin_atanhf(x))                              \
                          F##_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))                             \
                              F##_2(pow, __builtin_powf(x, y)) F##_2(powr, x < 0.0f ? NAN : __builtin_powf(x, y))      \
                                  F##_2(atan2, __builtin_atan2f(x, y)) F##_2(fmod, __builtin_fmodf(x, y))              \
                                      F##_2(fmin, __builtin_fminf(x, y)) F##_2(fmax, __builtin_fmaxf(x, y))            \
                                          F##_2(divide, x / y)
#define MSL_FLOAT_FUNCTIONS(F)                                                                                   \
  MSL_VARIED_FUNCTIONS(F)                                                                                        \
  F##_1(floor, __builtin_floorf(x)) F##_1(ceil, __builtin_ceilf(x)) F##_1(round, __builtin_roundf(x))            \
      F##_1(rint, __builtin_rintf(x)) F##_1(trunc, __builtin_truncf(x)) F##_1(fabs, __builtin_fabsf(x))          \
          F##_1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f)) F##_1(sign, x > 0.0f    ? 1.0f  \
                                                                                             : x < 0.0f  ? -1.0f \
                                                                                             : x == 0.0f ? x     \
                                                                                                         : 0.0f) \
              F##_2(copysign, __builtin_copysignf(x, y)) F##_2(step, y < x ? 0.0f : 1.0f)                        \
                  F##_3(fma, __builtin_fmaf(x, y, z)) F##_3(mix, x + (y - x) * z) F##_2(fdim, x <= y ? 0.0f : x - y)

MSL_FLOAT_FUNCTIONS(MSL_FLOAT_FUNCTION)
namespace precise {
MSL_VARIED_FUNCTIONS(MSL_FLOAT_ONLY)
}
namespace fast {
MSL_VARIED_FUNCTIONS(MSL_FLOAT_ONLY)
}
#undef MSL_VARIED_FUNCTIONS
#undef MSL_FLOAT_FUNCTIONS

#define MSL_MIN_MAX(T, smaller, larger)      \
  inline T min(T x, T y) { return smaller; } \
  inline T max(T x, T y) { return larger; }  \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define MSL_INTEGERS(DO) DO(char) DO(uchar) DO(short) DO(ushort) DO(int) DO(uint) DO(long) DO(ulong)
#define MSL_INT_MIN_MAX(T) MSL_MIN_MAX(T, y < x ? y : x, x < y ? y : x)
MSL_INTEGERS(MSL_INT_MIN_MAX)
#undef MSL_INT_MIN_MAX
#define MSL_FLOAT_MIN_MAX                                                     \
  MSL_MIN_MAX(float, __builtin_fminf(x, y), __builtin_fmaxf(x, y))            \
  MSL_MIN_MAX(half, half(__builtin_fminf(x, y)), half(__builtin_fmaxf(x, y))) \
  void min(bfloat, bfloat) = delete;                                          \
  void max(bfloat, bfloat) = delete;                                          \
  void clamp(bfloat, bfloat, bfloat) = delete;                                \
  template <class T, int N>                                                   \
  vec<T, N> min(vec<T, N> a, vec<T, N> b) {                                   \
    return msl_each(a, b, [](T p, T q) { return min(p, q); });                \
  }                                                                           \
  template <class T, int N>                                                   \
  vec<T, N> max(vec<T, N> a, vec<T, N> b) {                                   \
    return msl_each(a, b, [](T p, T q) { return max(p, q); });                \
  }                                                                           \
  template <class T, int N>                                                   \
  vec<T, N> clamp(vec<T, N> v, vec<T, N> low, vec<T, N> high) {               \
    return min(max(v, low), high);                                            \
  }                                                                           \
  template <class T, int N>                                                   \
  vec<T, N> min(vec<T, N> a, msl_same_t<T> b) {                               \
    return min(a, vec<T, N>(b));                                              \
  }                                                                           \
  template <class T, int N>                                                   \
  vec<T, N> max(vec<T, N> a, msl_same_t<T> b) {                               \
    return max(a, vec<T, N>(b));                                              \
  }                                                                           \
  template <class T, int N>                                                   \
  vec<T, N> clamp(vec<T, N> v, msl_same_t<T> low, msl_same_t<T> high) {       \
    return min(max(v, low), high);                                            \
  }
MSL_FLOAT_MIN_MAX
namespace precise {
MSL_FLOAT_MIN_MAX
}
namespace fast {
MSL_FLOAT_MIN_MAX
}

#define MSL_INTEGER_FUNCTIONS(T)                                                                       \
  inline T popcount(T x) { return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T))))); } \
  inline T clz(T x) {                                                                                  \
    ulong bits = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));                                            \
    return bits ? T(__builtin_clzl(bits) - (64 - 8 * int(sizeof(T)))) : T(8 * sizeof(T));              \
  }                                                                                                    \
  inline T ctz(T x) { return x ? T(__builtin_ctzl(ulong(x))) : T(8 * sizeof(T)); }                     \
  inline T reverse_bits(T x) { return T(__builtin_bitreverse64(ulong(x)) >> (64 - 8 * sizeof(T))); }   \
  inline T mulhi(T a, T b) { return T(((__int128)a * (__int128)b) >> (8 * sizeof(T))); }               \
  inline T absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }                                   \
  inline T rotate(T x, T by) {                                                                         \
    constexpr int width = 8 * sizeof(T);                                                               \
    int n = int(ulong(by) % width);                                                                    \
    ulong bits = ulong(x) & (~0ul >> (64 - width));                                                    \
    return n ? T(bits << n | bits >> (width - n)) : x;                                                 \
  }
MSL_INTEGERS(MSL_INTEGER_FUNCTIONS)
#undef MSL_INTEGER_FUNCTIONS
template <class T, int N>
vec<T, N> popcount(vec<T, N> v) {
  return msl_each(v, [](T e) { return popcount(e); });
}
template <class T, int N>
vec<T, N> ctz(vec<T, N> v) {
  return msl_each(v, [](T e) { return ctz(e); });
}
template <class T, int N>
vec<T, N> clz(vec<T, N> v) {
  return msl_each(v, [](T e) { return clz(e); });
}
#define MSL_THREE(T)                                         \
  inline T max3(T x, T y, T z) { return max(x, max(y, z)); } \
  inline T min3(T x, T y, T z) { return min(x, min(y, z)); } \
  inline T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }
MSL_INTEGERS(MSL_THREE)
MSL_THREE(half)
MSL_THREE(float)
#undef MSL_THREE
template <class T>
T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return 0;
  return T(T(x << (8 * sizeof(T) - bits - offset)) >> (8 * sizeof(T) - bits));
}

inline char abs(char x) { return x < 0 ? char(-x) : x; }
inline short abs(short x) { return x < 0 ? short(-x) : x; }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline uchar abs(uchar x) { return x; }
inline ushort abs(ushort x) { return x; }
inline uint abs(uint x) { return x; }
inline ulong abs(ulong x) { return x; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return half(__builtin_fabsf(x)); }
void abs(bfloat) = delete;
template <class T, int N>
vec<T, N> abs(vec<T, N> v) {
  return msl_each(v, [](T e) { return abs(e); });
}
inline float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
inline int ilogb(float x) { return __builtin_ilogbf(x); }
inline float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }

#define MSL_PREDICATE(name, expression)              \
  inline bool name(float x) { return expression; }   \
  inline bool name(half h) {                         \
    float x = h;                                     \
    return expression;                               \
  }                                                  \
  inline bool name(bfloat b) {                       \
    float x = b;                                     \
    return expression;                               \
  }                                                  \
  template <class T, int N>                          \
  vec<bool, N> name(vec<T, N> v) {                   \
    return msl_each(v, [](T e) { return name(e); }); \
  }
MSL_PREDICATE(isnan, x != x)
MSL_PREDICATE(isinf, __builtin_fabsf(x) == INFINITY)
MSL_PREDICATE(isfinite, __builtin_fabsf(x) < INFINITY)
MSL_PREDICATE(isnormal, __builtin_fabsf(x) < INFINITY && __builtin_fabsf(x) >= FLT_MIN)
MSL_PREDICATE(signbit, (__builtin_bit_cast(uint, x) >> 31) != 0)
#undef MSL_PREDICATE

#define MSL_SELECT(T) \
  inline T select(T a, T b, bool c) { return c ? b : a; }
MSL_INTEGERS(MSL_SELECT)
MSL_SELECT(bool)
MSL_SELECT(half)
MSL_SELECT(bfloat)
MSL_SELECT(float)
#undef MSL_SELECT
template <class T, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.msl_set(i, c.msl_get(i) ? b.msl_get(i) : a.msl_get(i));
  return r;
}
template <class T, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) {
  return c ? b : a;
}
template <int N>
bool all(vec<bool, N> v) {
  for (int i = 0; i < N; ++i)
    if (!v.msl_get(i)) return false;
  return true;
}
template <int N>
bool any(vec<bool, N> v) {
  for (int i = 0; i < N; ++i)
    if (v.msl_get(i)) return true;
  return false;
}
inline bool all(bool b) { return b; }
inline bool any(bool b) { return b; }

template <class T, int N>
T dot(vec<T, N> a, vec<T, N> b) {
  static_assert(__is_same(T, float) || __is_same(T, half), "dot and length take vectors of float or half");
  T sum = T(a.x * b.x);
  for (int i = 1; i < N; ++i) sum = T(sum + T(a.msl_get(i) * b.msl_get(i)));
  return sum;
}
template <class T, int N>
T length_squared(vec<T, N> v) {
  return dot(v, v);
}
template <class T, int N>
T length(vec<T, N> v) {
  return sqrt(dot(v, v));
}
template <class T, int N>
vec<T, N> normalize(vec<T, N> v) {
  return v * rsqrt(dot(v, v));
}
template <class T, int N>
vec<T, N> fma(vec<T, N> a, msl_same_t<T> b, vec<T, N> c) {
  return fma(a, vec<T, N>(b), c);
}
template <class T, int N>
vec<T, N> mix(vec<T, N> a, vec<T, N> b, msl_same_t<T> c) {
  return mix(a, b, vec<T, N>(c));
}
}  // namespace metal
