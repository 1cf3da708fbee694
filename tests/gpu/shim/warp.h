// Operations of several threads on a warp of 32: barriers, simdgroup functions, 8x8 matrices.
#pragma once

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

constexpr uint msl_all_lanes = 0xffffffff;

inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(msl_all_lanes); }

inline uint msl_lane_index() { return ::msl::thread_index() % 32; }

// Shuffles the 32-bit words of a value one by one; smaller values are widened.
template <class T, class Move>
T msl_moved(T value, Move move) {
  constexpr int words = (sizeof(T) + 3) / 4;
  int all[words] = {};
  __builtin_memcpy(all, &value, sizeof(T));
  for (int& word : all) word = move(word);
  __builtin_memcpy(&value, all, sizeof(T));
  return value;
}
// The compiler may reorder this and merge calls with the same value.
inline int msl_from_place(int word, uint place) {
  int moved;
  asm("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(moved) : "r"(word), "r"(place));
  return moved;
}
template <class T>
T simd_shuffle(T value, ushort lane) {
  const uint place = ::msl::place_of(lane);
  return msl_moved(value, [=](int word) { return msl_from_place(word, place); });
}
template <class T>
T simd_shuffle_xor(T value, ushort mask) {
  const uint places = ::msl::place_of(mask);
  return msl_moved(value, [=](int word) { return __nvvm_shfl_sync_bfly_i32(msl_all_lanes, word, places, 31); });
}
template <class T>
T simd_shuffle_up(T value, ushort delta) {
  const uint lane = msl_lane_index();
  return simd_shuffle(value, lane < delta ? lane : lane - delta);
}
template <class T>
T simd_shuffle_down(T value, ushort delta) {
  const uint lane = msl_lane_index();
  return simd_shuffle(value, lane + delta < 32 ? lane + delta : lane);
}
template <class T>
T simd_broadcast(T value, ushort lane) {
  return simd_shuffle(value, lane);
}
template <class T>
T simd_broadcast_first(T value) {
  return simd_shuffle(value, 0);
}

#define MSL_REDUCE(name, T, expression)       \
  template <class T>                          \
  T name(T a) {                               \
    for (ushort step = 16; step; step /= 2) { \
      const T b = simd_shuffle_xor(a, step);  \
      a = T(expression);                      \
    }                                         \
    return a;                                 \
  }
MSL_REDUCE(simd_sum, T, a + b)
MSL_REDUCE(simd_product, T, a* b)
MSL_REDUCE(simd_max, T, max(a, b))
MSL_REDUCE(simd_min, T, min(a, b))
MSL_REDUCE(simd_and, T, a& b)
MSL_REDUCE(simd_or, T, a | b)
MSL_REDUCE(simd_xor, T, a ^ b)
#undef MSL_REDUCE

template <class T>
T simd_prefix_inclusive_sum(T value) {
  for (ushort step = 1; step < 32; step *= 2) {
    const T before = simd_shuffle_up(value, step);
    if (msl_lane_index() >= step) value = T(value + before);
  }
  return value;
}
template <class T>
T simd_prefix_exclusive_sum(T value) {
  return T(simd_prefix_inclusive_sum(value) - value);
}

#ifndef MSL_MATRICES  // lanes are in other places
class simd_vote {
 public:
  using vote_t = ulong;
  explicit simd_vote(vote_t bits) : bits_(bits) {}
  explicit operator vote_t() const { return bits_; }

 private:
  vote_t bits_;
};
inline simd_vote simd_ballot(bool value) { return simd_vote(uint(__nvvm_vote_ballot_sync(msl_all_lanes, value))); }
#endif
inline bool simd_any(bool value) { return __nvvm_vote_any_sync(msl_all_lanes, value); }
inline bool simd_all(bool value) { return __nvvm_vote_all_sync(msl_all_lanes, value); }

// --- simdgroup_matrix, on tensor cores. The places of the elements are those of the simulator.

inline uint msl_matrix_row(uint lane) { return lane / 2 % 4 + lane / 16 * 4; }
inline uint msl_matrix_column(uint lane) { return lane % 2 * 2 + lane / 8 % 2 * 4; }
inline uint msl_matrix_lane(uint row, uint column) {
  return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2;
}

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  vec<T, 2>& thread_elements() { return msl_at; }
  vec<T, 2> msl_at;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  return {vec<T, 2>(value)};
}

inline ulong msl_matrix_offset(uint i, ulong elements_per_row, ulong2 origin, bool transpose) {
  const ulong row = msl_matrix_row(msl_lane_index()), column = msl_matrix_column(msl_lane_index()) + i;
  return (origin.y + (transpose ? column : row)) * elements_per_row + origin.x + (transpose ? row : column);
}
template <class T, class U>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* from, ulong elements_per_row = 8, ulong2 origin = ulong2(0),
                    bool transpose = false) {
  for (uint i = 0; i < 2; ++i) m.msl_at.msl_set(i, from[msl_matrix_offset(i, elements_per_row, origin, transpose)]);
}
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> m, T* to, ulong elements_per_row = 8, ulong2 origin = ulong2(0),
                     bool transpose = false) {
  for (uint i = 0; i < 2; ++i) to[msl_matrix_offset(i, elements_per_row, origin, transpose)] = m.msl_at.msl_get(i);
}

// With this numbering of lanes, Metal's placement of the left factor and of the sums is the one of the tensor cores, if
// k is taken in the order 0, 2, 4, 6, 1, 3, 5, 7. The right factor must be transposed, with k in the same order.
inline float2 msl_transposed(float2 m) {
  const uint row = msl_matrix_row(msl_lane_index()), column = msl_matrix_column(msl_lane_index());
  const float2 x = simd_shuffle(m, ushort(msl_matrix_lane(column, row)));
  const float2 y = simd_shuffle(m, ushort(msl_matrix_lane(column + 1, row)));
  return row % 2 ? float2(x.y, y.y) : float2(x.x, y.x);
}

// Multiplies in double, 4 values of k at a time.
inline void msl_add_doubles(double& x, double& y, float a, float b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(x), "+d"(y)
      : "d"(double(a)), "d"(double(b)));
}
inline float2 msl_product_of_doubles(float2 a, float2 b, float2 c) {
  const float2 right = msl_transposed(b);
  double x = c.x, y = c.y;
  msl_add_doubles(x, y, a.x, right.x);
  msl_add_doubles(x, y, a.y, right.y);
  return float2(float(x), float(y));
}

// Multiplies in tf32, which has 11 bits of precision, enough for a bfloat. The left matrix has 16 rows; 8 are empty.
inline float2 msl_add_narrow(float2 a, float2 b, float2 c) {
  float none_x = 0, none_y = 0;
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, "
      "%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(none_x), "+f"(none_y)
      : "r"(as_type<uint>(a.x)), "r"(0), "r"(as_type<uint>(a.y)), "r"(as_type<uint>(b.x)), "r"(as_type<uint>(b.y)));
  return c;
}
// A float as the sum of two tf32 numbers, which have 22 of its 24 bits. If the first is exact, the second is a tiny
// multiple of it instead of 0, because infinity times 0 is NaN.
struct msl_narrow {
  explicit msl_narrow(float2 pair) {
    const uint2 bits(as_type<uint>(pair.x), as_type<uint>(pair.y)), rest(bits.x & 0x1fff, bits.y & 0x1fff);
    high = float2(as_type<float>(bits.x & ~0x1fffu), as_type<float>(bits.y & ~0x1fffu));
    low = float2(rest.x ? pair.x - high.x : high.x * 0x1p-60f, rest.y ? pair.y - high.y : high.y * 0x1p-60f);
    const uint any = rest.x | rest.y;
    is_all = bool(__builtin_constant_p(any)) & (any == 0);
  }
  float2 high, low;
  bool is_all;  // the compiler knows that the first number is exact
};
inline float2 msl_narrow_product(msl_narrow a, msl_narrow b, float2 c) {
  const float2 first = msl_add_narrow(a.high, msl_transposed(b.high), c);
  const float2 second = msl_add_narrow(a.high, msl_transposed(b.low), first);
  return b.is_all ? first : second;
}

// No branches remain here: the conditions are known at compile time.
inline float2 msl_matrix_product(float2 a, float2 b, float2 c) {
  const msl_narrow left(a), right(b);
  const float2 narrow = msl_narrow_product(left, right, c), doubles = msl_product_of_doubles(a, b, c);
  return left.is_all ? narrow : doubles;
}
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  const auto floats = [](auto pair) { return float2(float(pair.x), float(pair.y)); };
  const float2 product = msl_matrix_product(floats(a.msl_at), floats(b.msl_at), floats(c.msl_at));
  d.msl_at = vec<D, 2>(D(product.x), D(product.y));
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}

}  // namespace metal
