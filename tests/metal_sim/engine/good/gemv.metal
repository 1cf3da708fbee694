// y = A x: a simdgroup has TM rows, a thread TN neighbouring columns at a time; the last block may exceed both sizes.
#include <metal_stdlib>
using namespace metal;

#define MLX_MTL_CONST static constant constexpr const

template <typename T, const int TM, const int TN>
struct GEMVKernel {
  MLX_MTL_CONST int lanes = 32;
  MLX_MTL_CONST int blockN = TN * lanes;

  template <typename U>
  static inline void load_unsafe(const device T* src, thread U dst[TN], const int offset = 0) {
#pragma clang loop unroll(full)
    for (int tn = 0; tn < TN; tn++) dst[tn] = static_cast<U>(src[offset + tn]);
  }
  template <typename U>
  static inline void load_safe(const device T* src, thread U dst[TN], const int offset, const int size) {
    for (int tn = 0; tn < TN; tn++) dst[tn] = offset + tn < size ? static_cast<U>(src[offset + tn]) : U(0);
  }

  static inline void run(const device T* mat, const device T* in_vec, device T* out_vec, const constant int& in_size,
                         const constant int& out_size, const int row, const uint lane) {
    if (row >= out_size) return;
    const int first = out_size >= TM ? min(row, out_size - TM) : 0;  // the last rows are computed twice
    const int rows = min(TM, out_size - first);
    float result[TM] = {0};
    float inter[TN], coeff[TN];
    const device T* at = mat + size_t(first) * in_size;
    for (int bn = lane * TN; bn < in_size; bn += blockN) {
      const bool whole = bn + TN <= in_size;
      if (whole) {
        load_unsafe<float>(in_vec, coeff, bn);
      } else {
        load_safe<float>(in_vec, coeff, bn, in_size);
      }
      for (int tm = 0; tm < rows; tm++) {
        if (whole) {
          load_unsafe<float>(at + size_t(tm) * in_size, inter, bn);
        } else {
          load_safe<float>(at + size_t(tm) * in_size, inter, bn, in_size);
        }
        for (int tn = 0; tn < TN; tn++) result[tm] += inter[tn] * coeff[tn];
      }
    }
    for (int tm = 0; tm < rows; tm++) {
      for (ushort sn = 16; sn >= 1; sn >>= 1) result[tm] += simd_shuffle_xor(result[tm], sn);
    }
    if (lane == 0 && first == row) {
      for (int tm = 0; tm < rows; tm++) out_vec[first + tm] = static_cast<T>(result[tm]);
    } else if (lane == 0) {
      for (int tm = row - first; tm < rows; tm++) out_vec[first + tm] = static_cast<T>(result[tm]);
    }
  }
};

template <typename T, const int SIMDGROUPS, const int TM, const int TN>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void gemv(
    const device T* mat [[buffer(0)]], const device T* in_vec [[buffer(1)]], device T* out_vec [[buffer(2)]],
    const constant int& in_vec_size [[buffer(3)]], const constant int& out_vec_size [[buffer(4)]],
    uint3 tid [[threadgroup_position_in_grid]], uint simd_gid [[simdgroup_index_in_threadgroup]],
    uint simd_lid [[thread_index_in_simdgroup]]) {
  using Kernel = GEMVKernel<T, TM, TN>;
  const int row = (tid.x * SIMDGROUPS + simd_gid) * TM;
  Kernel::run(mat, in_vec, out_vec, in_vec_size, out_vec_size, row, simd_lid);
}

#define instantiate_gemv(name, T, ...) \
  template [[host_name("gemv_" name)]] [[kernel]] decltype(gemv<T, __VA_ARGS__>) gemv<T, __VA_ARGS__>;
instantiate_gemv("float", float, 4, 4, 4)
instantiate_gemv("bfloat", bfloat, 2, 1, 8)
