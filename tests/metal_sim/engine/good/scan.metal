// Prefix sums of rows, four elements per thread: simdgroup scans, then the sums of the previous simdgroups.
#include <metal_stdlib>
using namespace metal;

inline uint ceildiv(uint n, uint m) { return (n + m - 1) / m; }

template <typename U>
struct CumSum {
  static constexpr constant U init = static_cast<U>(0);

  template <typename T>
  U operator()(U a, T b) const {
    return a + b;
  }
  U simd_exclusive_scan(U x) const { return simd_prefix_exclusive_sum(x); }
};

template <typename U>
struct CumProd {
  static constexpr constant U init = static_cast<U>(1.0f);

  template <typename T>
  U operator()(U a, T b) const {
    return a * b;
  }
  U simd_exclusive_scan(U x) const {
    for (int i = 1; i <= 16; i *= 2) x = (*this)(x, simd_shuffle_and_fill_up(x, init, ushort(i)));
    return simd_shuffle_and_fill_up(x, init, 1);
  }
};

template <typename U, typename Op, bool inclusive>
[[kernel]] void contiguous_scan(const device U* in [[buffer(0)]], device U* out [[buffer(1)]],
                                const constant size_t& axis_size [[buffer(2)]],
                                uint gid [[threadgroup_position_in_grid]], uint lid [[thread_position_in_threadgroup]],
                                uint lsize [[threads_per_threadgroup]],
                                uint simd_size [[threads_per_simdgroup]], uint simd_lane_id [[thread_index_in_simdgroup]],
                                uint simd_group_id [[simdgroup_index_in_threadgroup]]) {
  constexpr Op op;
  constexpr int N_READS = 4;
  threadgroup U simdgroup_sums[32];
  in += gid * axis_size;
  out += gid * axis_size;
  const uint simd_groups = lsize / simd_size;
  U prefix = Op::init;
  U values[N_READS];
  for (uint r = 0; r < ceildiv(uint(axis_size), N_READS * lsize); r++) {
    const uint offset = r * lsize * N_READS + lid * N_READS;
    for (int i = 0; i < N_READS; i++) values[i] = offset + i < axis_size ? in[offset + i] : Op::init;
    for (int i = 1; i < N_READS; i++) values[i] = op(values[i], values[i - 1]);
    U prev_thread = op.simd_exclusive_scan(values[N_READS - 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_lane_id == simd_size - 1) simdgroup_sums[simd_group_id] = op(prev_thread, values[N_READS - 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_group_id == 0) {
      const U sum = simd_lane_id < simd_groups ? simdgroup_sums[simd_lane_id] : Op::init;
      const U prev_simdgroup = op.simd_exclusive_scan(sum);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_sums[simd_lane_id] = prev_simdgroup;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const U before = op(op(prefix, simdgroup_sums[simd_group_id]), prev_thread);
    for (int i = 0; i < N_READS; i++) {
      const U value = inclusive ? op(values[i], before) : i ? op(values[i - 1], before) : before;
      if (offset + i < axis_size) out[offset + i] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_group_id == simd_groups - 1 && simd_lane_id == simd_size - 1) {
      simdgroup_sums[0] = op(before, values[N_READS - 1]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefix = simdgroup_sums[0];
  }
}

#define instantiate_scan(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(contiguous_scan<__VA_ARGS__>) contiguous_scan<__VA_ARGS__>;
instantiate_scan("cumsum_inclusive", float, CumSum<float>, true)
instantiate_scan("cumsum_exclusive", int, CumSum<int>, false)
instantiate_scan("cumprod_inclusive", float, CumProd<float>, true)
