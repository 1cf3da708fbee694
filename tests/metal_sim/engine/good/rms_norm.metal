// One row per threadgroup, four elements per thread, two levels of sums: y = x * rsqrt(mean(x * x) + eps) * w.
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

#define SIMD_SIZE 32

template <typename T, int N_READS = 4>
[[kernel]] void rms_norm(const device T* x [[buffer(0)]], const device T* w [[buffer(1)]], device T* out [[buffer(2)]],
                         constant float& eps [[buffer(3)]], constant uint& axis_size [[buffer(4)]],
                         uint gid [[threadgroup_position_in_grid]], uint lid [[thread_position_in_threadgroup]],
                         uint simd_lane_id [[thread_index_in_simdgroup]],
                         uint simd_group_id [[simdgroup_index_in_threadgroup]]) {
  threadgroup float local_inv_mean[1];
  threadgroup float local_sums[SIMD_SIZE] = {0};

  float acc = 0;
  x += gid * size_t(axis_size) + lid * N_READS;
  w += lid * N_READS;
  if (lid * N_READS + N_READS <= axis_size) {
    for (int i = 0; i < N_READS; i++) {
      float xi = float(x[i]);
      acc += xi * xi;
    }
  } else {
    for (int i = 0; i < N_READS; i++) {
      if ((lid * N_READS + i) < axis_size) {
        float xi = float(x[i]);
        acc += xi * xi;
      }
    }
  }
  acc = simd_sum(acc);
  if (simd_group_id == 0) {
    local_sums[simd_lane_id] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_lane_id == 0) {
    local_sums[simd_group_id] = acc;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_group_id == 0) {
    acc = simd_sum(local_sums[simd_lane_id]);
    if (simd_lane_id == 0) {
      local_inv_mean[0] = metal::precise::rsqrt(acc / axis_size + eps);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out += gid * size_t(axis_size) + lid * N_READS;
  for (int i = 0; i < N_READS && lid * N_READS + i < axis_size; i++) {
    out[i] = T(float(w[i]) * float(T(float(x[i]) * local_inv_mean[0])));
  }
}

#define instantiate_rms(name, T) template [[host_name("rms_norm_" #name)]] [[kernel]] decltype(rms_norm<T>) rms_norm<T>;
instantiate_rms(float32, float)
instantiate_rms(float16, half)
instantiate_rms(bfloat16, bfloat)
