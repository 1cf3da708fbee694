// Operations of several threads: barriers, simdgroup and quad functions, 8x8 matrices, atomics.
#pragma once

#include "math.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

__attribute__((convergent, noinline)) MSL_UNCHECKED inline void threadgroup_barrier(mem_flags flags,
                                                                                    ::msl::Site site = MSL_SITE) {
  ::msl::state.barrier(uint(flags), site.value);
}
__attribute__((convergent, noinline)) MSL_UNCHECKED inline void simdgroup_barrier(mem_flags flags,
                                                                                  ::msl::Site site = MSL_SITE) {
  ::msl::state.rendezvous(::msl::abi::Op::simdgroup_barrier, site.value, nullptr, uint(flags));
}

// Every lane stores its value in its slot; the last one to arrive computes all results.
using msl_slots = unsigned char (*)[::msl::abi::slot_bytes];
using msl_const_slots = const unsigned char (*)[::msl::abi::slot_bytes];

template <class R, class In>
__attribute__((convergent, noinline)) MSL_UNCHECKED R msl_exchange(::msl::abi::Op op, ::msl::Site site, In value,
                                                                   ::msl::abi::Combine combine) {
  static_assert(sizeof(In) <= ::msl::abi::slot_bytes);
  ::msl::abi::Thread* t = ::msl::state.thread;
  __builtin_memcpy(t->simdgroup->in[t->lane], &value, sizeof(In));
  ::msl::state.rendezvous(op, site.value, combine, 0);
  R result;
  __builtin_memcpy(&result, t->simdgroup->out[t->lane], sizeof(R));
  return result;
}
template <class T>
T msl_take(msl_const_slots in, uint lane) {
  T value;
  __builtin_memcpy(&value, in[lane], sizeof(T));
  return value;
}
template <class T>
void msl_put(msl_slots out, uint lane, T value) {
  __builtin_memcpy(out[lane], &value, sizeof(T));
}

template <class T>
constexpr bool msl_simd_type() {
  using E = typename msl_lanes<T>::element;
  return msl_is_scalar<E> && sizeof(E) <= 4 && !__is_same(E, bool) && !__is_same(E, bfloat);
}

// A tree over halves of the simdgroup, so that every lane gets the same bits. Apple does not say which order it uses.
template <class T, class F>
MSL_UNCHECKED void msl_reduce_tree(msl_const_slots in, msl_slots out, F combine, uint width) {
  T v[32];
  for (uint i = 0; i < 32; ++i) v[i] = msl_take<T>(in, i);
  for (uint step = width / 2; step; step /= 2)
    for (uint i = 0; i < 32; ++i)
      if (i % width < step) v[i] = combine(v[i], v[i + step]);
  for (uint i = 0; i < 32; ++i) msl_put<T>(out, i, v[i / width * width]);
}

#define MSL_REDUCE(name, op, width, T, expression)                                                  \
  template <class T>                                                                                \
  T name(T value, ::msl::Site site = MSL_SITE) {                                                    \
    static_assert(msl_simd_type<T>(), #name " takes half, float and integers of 32 bits or fewer"); \
    return msl_exchange<T>(op, site, value, [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {   \
      msl_reduce_tree<T>(in, out, [](T a, T b) { return T(expression); }, width);                   \
    });                                                                                             \
  }
#define MSL_REDUCTIONS(prefix, op, width)           \
  MSL_REDUCE(prefix##_sum, op, width, T, a + b)     \
  MSL_REDUCE(prefix##_product, op, width, T, a* b)  \
  MSL_REDUCE(prefix##_max, op, width, T, max(a, b)) \
  MSL_REDUCE(prefix##_min, op, width, T, min(a, b)) \
  MSL_REDUCE(prefix##_and, op, width, T, a& b)      \
  MSL_REDUCE(prefix##_or, op, width, T, a | b)      \
  MSL_REDUCE(prefix##_xor, op, width, T, a ^ b)
MSL_REDUCTIONS(simd, ::msl::abi::Op::simd_reduce, 32)
MSL_REDUCTIONS(quad, ::msl::abi::Op::quad, 4)
#undef MSL_REDUCTIONS
#undef MSL_REDUCE

#define MSL_SCAN(name, first, T, expression, before)                                                \
  template <class T>                                                                                \
  T name(T value, ::msl::Site site = MSL_SITE) {                                                    \
    static_assert(msl_simd_type<T>(), #name " takes half, float and integers of 32 bits or fewer"); \
    return msl_exchange<T>(::msl::abi::Op::simd_scan, site, value,                                  \
                           [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {                    \
                             T a = T(first);                                                        \
                             for (uint i = 0; i < 32; ++i) {                                        \
                               T b = msl_take<T>(in, i);                                            \
                               if (before) msl_put<T>(out, i, a);                                   \
                               a = T(expression);                                                   \
                               if (!before) msl_put<T>(out, i, a);                                  \
                             }                                                                      \
                           });                                                                      \
  }
MSL_SCAN(simd_prefix_exclusive_sum, 0, T, a + b, true)
MSL_SCAN(simd_prefix_inclusive_sum, 0, T, a + b, false)
MSL_SCAN(simd_prefix_exclusive_product, 1, T, a* b, true)
MSL_SCAN(simd_prefix_inclusive_product, 1, T, a* b, false)
#undef MSL_SCAN

template <class T>
struct msl_Sent {
  T value;
  uint argument;
};

// source: the lane to read from; with 32 or more, the lane keeps its own value.
template <class T, class Source>
T msl_shuffle(T value, uint argument, ::msl::Site site, Source) {
  static_assert(msl_simd_type<T>(),
                "simd_shuffle takes half, float and integers of 32 bits or fewer, not bfloat or bool");
  return msl_exchange<T>(::msl::abi::Op::simd_shuffle, site, msl_Sent<T>{value, argument},
                         [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {
                           for (uint lane = 0; lane < 32; ++lane) {
                             uint from = Source()(lane, msl_take<msl_Sent<T>>(in, lane).argument);
                             msl_put<T>(out, lane, msl_take<msl_Sent<T>>(in, from < 32 ? from : lane).value);
                           }
                         });
}
inline uint msl_lane_in_range(uint lane) {
  if (lane >= 32) ::msl::violation("simdgroup", "a lane of 32 or more is read");
  return lane;
}
template <class T>
T simd_shuffle(T value, ushort lane, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, lane, site, [](uint, uint from) { return msl_lane_in_range(from); });
}
template <class T>
T simd_shuffle_xor(T value, ushort mask, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, mask, site, [](uint lane, uint m) { return msl_lane_in_range(lane ^ m); });
}
template <class T>
T simd_shuffle_up(T value, ushort delta, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, delta, site, [](uint lane, uint d) { return lane >= d ? lane - d : 32; });
}
template <class T>
T simd_shuffle_down(T value, ushort delta, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, delta, site, [](uint lane, uint d) { return lane + d; });
}
template <class T>
T simd_shuffle_rotate_up(T value, ushort delta, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, delta, site, [](uint lane, uint d) { return (lane - d) % 32; });
}
template <class T>
T simd_shuffle_rotate_down(T value, ushort delta, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, delta, site, [](uint lane, uint d) { return (lane + d) % 32; });
}
// Lanes that would read beyond a segment of `modulo` lanes get the filling's values from the other end of the segment.
template <class T>
struct msl_Filled {
  T value, filling;
};
template <class T, class Source>
T msl_shuffle_and_fill(T value, T filling, int delta, uint modulo, ::msl::Site site, Source) {
  static_assert(msl_simd_type<T>(), "simd_shuffle_and_fill takes half, float and integers of 32 bits or fewer");
  if (delta > int(modulo)) ::msl::violation("simdgroup", "simd_shuffle_and_fill moves by more lanes than there are");
  using Moved = msl_Sent<msl_Filled<T>>;
  const uint way = uint(delta) << 8 | modulo;
  return msl_exchange<T>(::msl::abi::Op::simd_shuffle, site, Moved{{value, filling}, way},
                         [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {
                           for (int lane = 0; lane < 32; ++lane) {
                             const uint sent = msl_take<Moved>(in, lane).argument, modulo = sent & 255;
                             const int from = Source()(lane % int(modulo), int(sent >> 8)),
                                       first = lane - lane % int(modulo);
                             const bool inside = from >= 0 && from < int(modulo);
                             const int wrapped = first + (from + int(modulo)) % int(modulo);
                             const auto pair = msl_take<Moved>(in, wrapped).value;
                             msl_put<T>(out, lane, inside ? pair.value : pair.filling);
                           }
                         });
}
template <class T>
T simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo = 32, ::msl::Site site = MSL_SITE) {
  return msl_shuffle_and_fill(value, filling, delta, modulo, site, [](int lane, int d) { return lane - d; });
}
template <class T>
T simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo = 32, ::msl::Site site = MSL_SITE) {
  return msl_shuffle_and_fill(value, filling, delta, modulo, site, [](int lane, int d) { return lane + d; });
}
template <class T>
T quad_shuffle_xor(T value, ushort mask, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, mask, site, [](uint lane, uint m) { return m < 4 ? lane ^ m : msl_lane_in_range(32); });
}
template <class T>
T quad_broadcast(T value, ushort from, ::msl::Site site = MSL_SITE) {
  return msl_shuffle(value, from, site,
                     [](uint lane, uint f) { return f < 4 ? lane / 4 * 4 + f : msl_lane_in_range(32); });
}
template <class T>
T simd_broadcast(T value, ushort from, ::msl::Site site = MSL_SITE) {
  static_assert(msl_simd_type<T>(),
                "simd_broadcast takes half, float and integers of 32 bits or fewer, not bfloat or bool");
  return msl_exchange<T>(::msl::abi::Op::simd_shuffle, site, msl_Sent<T>{value, from},
                         [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {
                           uint source = msl_lane_in_range(msl_take<msl_Sent<T>>(in, 0).argument);
                           for (uint lane = 0; lane < 32; ++lane) {
                             if (msl_take<msl_Sent<T>>(in, lane).argument != source)
                               ::msl::violation("simdgroup", "simd_broadcast of different lanes");
                             msl_put<T>(out, lane, msl_take<msl_Sent<T>>(in, source).value);
                           }
                         });
}
template <class T>
T simd_broadcast_first(T value, ::msl::Site site = MSL_SITE) {
  return simd_broadcast(value, ushort(0), site);
}

class simd_vote {
 public:
  using vote_t = ulong;
  simd_vote() = default;
  explicit constexpr simd_vote(vote_t bits) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  bool all() const { return bits_ == 0xffffffff; }
  bool any() const { return bits_ != 0; }

 private:
  vote_t bits_;
};
inline simd_vote simd_ballot(bool value, ::msl::Site site = MSL_SITE) {
  return simd_vote(
      msl_exchange<ulong>(::msl::abi::Op::simd_vote, site, value, [](msl_const_slots in, msl_slots out) MSL_UNCHECKED {
        ulong bits = 0;
        for (uint i = 0; i < 32; ++i) bits |= ulong(msl_take<bool>(in, i)) << i;
        for (uint i = 0; i < 32; ++i) msl_put<ulong>(out, i, bits);
      }));
}
inline bool simd_any(bool value, ::msl::Site site = MSL_SITE) { return simd_ballot(value, site).any(); }
inline bool simd_all(bool value, ::msl::Site site = MSL_SITE) { return simd_ballot(value, site).all(); }
inline bool simd_is_first() { return ::msl::thread().lane == 0; }
inline simd_vote simd_active_threads_mask(::msl::Site site = MSL_SITE) { return simd_ballot(true, site); }

// --- simdgroup_matrix: lane l holds two neighbours of row (l/2)%4 + 4*(l/16), columns from 2*(l%2) + 4*(l/8%2).

inline uint msl_matrix_row(uint lane) { return lane / 2 % 4 + lane / 16 * 4; }
inline uint msl_matrix_column(uint lane) { return lane % 2 * 2 + lane / 8 % 2 * 4; }

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Metal has 8x8 matrices only");
  static_assert(__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat));
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint lane = ::msl::thread().lane;
    for (uint i = 0; i < 2; ++i)
      msl_at.msl_set(i, msl_matrix_row(lane) == msl_matrix_column(lane) + i ? diagonal : T(0.0f));
  }
  vec<T, 2>& thread_elements() { return msl_at; }
  const vec<T, 2>& thread_elements() const { return msl_at; }

  vec<T, 2> msl_at;
};
#define MSL_MATRIX(T) using simdgroup_##T##8x8 = simdgroup_matrix<T, 8, 8>;
MSL_MATRIX(float)
MSL_MATRIX(half)
MSL_MATRIX(bfloat)
#undef MSL_MATRIX

// Must be called by whole simdgroups with equal arguments, which the next simdgroup function checks.
template <class... A>
MSL_UNCHECKED void msl_remember_convergent_call(A... arguments) {
  uint64_t hash = ::msl::state.thread->convergence;
  ((hash = (hash ^ uint64_t(arguments)) * 0x9e3779b97f4a7c15 + 1), ...);
  ::msl::state.thread->convergence = hash;
}

template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.msl_at = vec<T, 2>(value);
  return m;
}
// Not defined for integers, as in Metal.
template <class T, int Columns, int Rows = Columns, class V>
  requires(__is_integral(V))
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(V value) = delete;
template <class T>
uint64_t msl_matrix_offset(uint i, ulong elements_per_row, ulong2 origin, bool transpose) {
  uint lane = ::msl::thread().lane;
  ulong row = msl_matrix_row(lane), column = msl_matrix_column(lane) + i;
  if (transpose) {
    ulong swap = row;
    row = column;
    column = swap;
  }
  return (origin.y + row) * elements_per_row + origin.x + column;
}
template <class T, ::msl::Space S, class U>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, ::msl::pointer<S, U> source, ulong elements_per_row = 8,
                    ulong2 origin = ulong2(0), bool transpose = false, ::msl::Site site = MSL_SITE) {
  static_assert(__is_same(const T, const U), "simdgroup_load converts nothing");
  msl_remember_convergent_call(site.value, source.bits(), elements_per_row, origin.x, origin.y, transpose);
  for (uint i = 0; i < 2; ++i)
    m.msl_at.msl_set(i, source[msl_matrix_offset<T>(i, elements_per_row, origin, transpose)]);
}
template <class T, ::msl::Space S>
void simdgroup_store(simdgroup_matrix<T, 8, 8> m, ::msl::pointer<S, T> to, ulong elements_per_row = 8,
                     ulong2 origin = ulong2(0), bool transpose = false, ::msl::Site site = MSL_SITE) {
  msl_remember_convergent_call(site.value, to.bits(), elements_per_row, origin.x, origin.y, transpose);
  for (uint i = 0; i < 2; ++i) to[msl_matrix_offset<T>(i, elements_per_row, origin, transpose)] = m.msl_at.msl_get(i);
}

template <class A, class B, class C>
struct msl_Operands {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};
// Products are summed in float in the order of k and rounded once. Apple does not say what its hardware does.
template <class D, class A, class B, class C>
MSL_UNCHECKED void msl_multiply(msl_const_slots in, msl_slots out) {
  float a[8][8], b[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    auto sent = msl_take<msl_Operands<A, B, C>>(in, lane);
    for (uint i = 0; i < 2; ++i) {
      a[msl_matrix_row(lane)][msl_matrix_column(lane) + i] = float(sent.a.msl_get(i));
      b[msl_matrix_row(lane)][msl_matrix_column(lane) + i] = float(sent.b.msl_get(i));
    }
  }
  for (uint lane = 0; lane < 32; ++lane) {
    vec<C, 2> c = msl_take<msl_Operands<A, B, C>>(in, lane).c;
    vec<D, 2> d;
    for (uint i = 0; i < 2; ++i) {
      float sum = float(c.msl_get(i));
      for (uint k = 0; k < 8; ++k)
        sum = __builtin_fmaf(a[msl_matrix_row(lane)][k], b[k][msl_matrix_column(lane) + i], sum);
      d.msl_set(i, D(sum));
    }
    msl_put(out, lane, d);
  }
}
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                   ::msl::Site site = MSL_SITE) {
  static_assert(sizeof(D) >= sizeof(A) && sizeof(D) >= sizeof(B),
                "a sum of matrices is at least as wide as its factors");
  static_assert(sizeof(A) != sizeof(B) || __is_same(A, B), "there is no product of a half and a bfloat matrix");
  d.msl_at = msl_exchange<vec<D, 2>>(::msl::abi::Op::simdgroup_multiply, site,
                                     msl_Operands<A, B, C>{a.msl_at, b.msl_at, c.msl_at}, msl_multiply<D, A, B, C>);
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                        ::msl::Site site = MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f)), site);
}

// All products written as `*` count as one call site, since operators have no source location.
template <class T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> product;
  simdgroup_multiply(product, a, b);
  return product;
}

// --- atomics

enum memory_order { memory_order_relaxed = 0 };

template <class T>
inline constexpr bool msl_is_word = __is_same(T, int) || __is_same(T, uint);
template <class T>
inline constexpr bool msl_is_number = msl_is_word<T> || __is_same(T, float);
template <class T>
inline constexpr bool msl_is_value = msl_is_number<T> || __is_same(T, bool);
template <class T>
inline constexpr bool msl_is_long = __is_same(T, ulong);
#define MSL_WORD "atomic_int and atomic_uint"
#define MSL_NUMBER "atomic_int, atomic_uint and atomic_float"
#define MSL_VALUE "atomic_int, atomic_uint, atomic_float and atomic_bool"
#define MSL_LONG "atomic_ulong"

template <class T>
struct atomic {
  using value_type = T;
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
  static_assert(msl_is_value<T> || msl_is_long<T>, "Metal has " MSL_VALUE ", and " MSL_LONG);
  T msl_value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

template <bool is_write, class T>
__attribute__((noinline)) MSL_UNCHECKED void msl_atomic_touch(T* object) {
  ::msl::accessed<is_write, true>((uint64_t)object, sizeof(T), __builtin_return_address(0));
}
template <class A, class F>
auto msl_atomic_update(A* object, F update) {
  using T = typename A::value_type;
  msl_atomic_touch<true>(object);
  QUIET T* value = ::msl::hush(&object->msl_value);
  T old = *value;
  *value = update(old);
  return old;
}
template <class A>
using msl_value_of = typename A::value_type;

// The object is a raw pointer (`&counter`) or a checked one; A is its atomic<T>, for a T that the function supports.
#define MSL_ATOMIC(result, name, kind, KIND, parameters, arguments, ...)                \
  template <class A>                                                                    \
    requires requires { typename A::value_type; }                                       \
  result name(A* object MSL_UNPAREN parameters) {                                       \
    static_assert(msl_is_##kind<msl_value_of<A>>, #name " is for " MSL_##KIND " only"); \
    __VA_ARGS__                                                                         \
  }                                                                                     \
  template <class A>                                                                    \
    requires requires { typename A::value_type; }                                       \
  result name(volatile A* object MSL_UNPAREN parameters) {                              \
    return name(const_cast<A*>(object) MSL_UNPAREN arguments);                          \
  }                                                                                     \
  template <::msl::Space S, class A>                                                    \
  result name(::msl::pointer<S, A> object MSL_UNPAREN parameters) {                     \
    return name(&*object MSL_UNPAREN arguments);                                        \
  }
#define MSL_ATOMIC_UPDATE(result, name, kind, KIND, expression)                                      \
  MSL_ATOMIC(                                                                                        \
      result, atomic_##name##_explicit, kind, KIND, (, msl_value_of<A> operand, memory_order order), \
      (, operand, order),                                                                            \
      return result(msl_atomic_update(object, [=](msl_value_of<A> old) { return msl_value_of<A>(expression); }));)
#define MSL_ATOMIC_FETCH(name, kind, KIND, expression) MSL_ATOMIC_UPDATE(msl_value_of<A>, name, kind, KIND, expression)
MSL_ATOMIC_FETCH(fetch_add, number, NUMBER, old + operand)
MSL_ATOMIC_FETCH(fetch_sub, number, NUMBER, old - operand)
MSL_ATOMIC_FETCH(fetch_and, word, WORD, old& operand)
MSL_ATOMIC_FETCH(fetch_or, word, WORD, old | operand)
MSL_ATOMIC_FETCH(fetch_xor, word, WORD, old ^ operand)
MSL_ATOMIC_FETCH(fetch_min, word, WORD, min(old, operand))
MSL_ATOMIC_FETCH(fetch_max, word, WORD, max(old, operand))
MSL_ATOMIC_FETCH(exchange, value, VALUE, operand)
MSL_ATOMIC_UPDATE(void, min, long, LONG, min(old, operand))
MSL_ATOMIC_UPDATE(void, max, long, LONG, max(old, operand))
#undef MSL_ATOMIC_FETCH
#undef MSL_ATOMIC_UPDATE
MSL_ATOMIC(void, atomic_store_explicit, value, VALUE, (, msl_value_of<A> operand, memory_order order),
           (, operand, order), msl_atomic_update(object, [=](msl_value_of<A>) { return operand; });)
MSL_ATOMIC(msl_value_of<A>, atomic_load_explicit, value, VALUE, (, memory_order order), (, order),
           msl_atomic_touch<false>(object);
           return *::msl::hush(&object->msl_value);)
MSL_ATOMIC(bool, atomic_compare_exchange_weak_explicit, value, VALUE,
           (, msl_value_of<A>* expected, msl_value_of<A> desired, memory_order success, memory_order failure),
           (, expected, desired, success, failure), msl_value_of<A> wanted = *expected;
           *expected = msl_atomic_update(object, [=](msl_value_of<A> old) { return old == wanted ? desired : old; });
           return *expected == wanted;)
#undef MSL_ATOMIC

}  // namespace metal

namespace msl {

template <Space S, class T, int Columns, int Rows>
inline constexpr bool may_be_in<S, metal::simdgroup_matrix<T, Columns, Rows>> = false;
template <>
inline constexpr bool may_be_in<Space::threadgroup, metal::atomic_float> = false;
template <>
inline constexpr bool may_be_in<Space::threadgroup, metal::atomic_ulong> = false;

}  // namespace msl
