// What threads do together, on a warp of 32: barriers, simdgroup functions, 8x8 matrices.
#pragma once

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

constexpr uint msl_all_lanes = 0xffffffff;

inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(msl_all_lanes); }

inline uint msl_lane_index() { return ::msl::thread_index() % 32; }

// A value's 32-bit words go through shuffles one by one; smaller values are widened.
template <class T, class Move>
T msl_moved(T value, Move move) {
  constexpr int words = (sizeof(T) + 3) / 4;
  int all[words] = {};
  __builtin_memcpy(all, &value, sizeof(T));
  for (int& word : all) word = move(word);
  __builtin_memcpy(&value, all, sizeof(T));
  return value;
}
template <class T>
T simd_shuffle(T value, ushort lane) {
  return msl_moved(value, [=](int word) { return __nvvm_shfl_sync_idx_i32(msl_all_lanes, word, lane, 31); });
}
template <class T>
T simd_shuffle_xor(T value, ushort mask) {
  return msl_moved(value, [=](int word) { return __nvvm_shfl_sync_bfly_i32(msl_all_lanes, word, mask, 31); });
}
template <class T>
T simd_shuffle_up(T value, ushort delta) {
  return msl_moved(value, [=](int word) { return __nvvm_shfl_sync_up_i32(msl_all_lanes, word, delta, 0); });
}
template <class T>
T simd_shuffle_down(T value, ushort delta) {
  return msl_moved(value, [=](int word) { return __nvvm_shfl_sync_down_i32(msl_all_lanes, word, delta, 31); });
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

inline bool simd_any(bool value) { return __nvvm_vote_any_sync(msl_all_lanes, value); }
inline bool simd_all(bool value) { return __nvvm_vote_all_sync(msl_all_lanes, value); }

// --- simdgroup_matrix: right, not fast. The places of the elements are those of the simulator.

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

// A function that is called: the tiles would have tens of megabytes of PTX where it is inlined.
__attribute__((noinline)) inline float2 msl_matrix_product(float2 a, float2 b, float2 c) {
  const uint row = msl_matrix_row(msl_lane_index()), column = msl_matrix_column(msl_lane_index());
  float x = c.x, y = c.y;
  for (uint k = 0; k < 8; k += 2) {
    const float2 left = simd_shuffle(a, ushort(msl_matrix_lane(row, k)));
    const float2 upper = simd_shuffle(b, ushort(msl_matrix_lane(k, column)));
    const float2 lower = simd_shuffle(b, ushort(msl_matrix_lane(k + 1, column)));
    x = __builtin_fmaf(left.y, lower.x, __builtin_fmaf(left.x, upper.x, x));
    y = __builtin_fmaf(left.y, lower.y, __builtin_fmaf(left.x, upper.y, y));
  }
  return float2(x, y);
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
