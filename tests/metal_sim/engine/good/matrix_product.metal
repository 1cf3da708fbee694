// C = A B (+ bias), in tiles of 32 x 32 with two by two simdgroups. Function constants say which sizes are aligned and
// whether there is a bias.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#define STEEL_CONST static constant constexpr const
#define STEEL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

constant bool has_bias [[function_constant(100)]];
constant bool align_MN [[function_constant(200)]];
constant bool align_K [[function_constant(201)]];
constant bool align_all = align_MN && align_K;

struct GEMMParams {
  const int M;
  const int N;
  const int K;
};

template <typename T, short ROWS, short COLS, short tgp_size>
struct BlockLoader {
  STEEL_CONST short n_reads = ROWS * COLS / tgp_size;
  STEEL_CONST short per_row = COLS / n_reads;
  STEEL_CONST short stride = COLS + 16 / sizeof(T);

  const int src_ld;
  const short bi, bj;
  threadgroup T* dst;
  const device T* src;

  BlockLoader(const device T* src_, const int src_ld_, threadgroup T* dst_, ushort thread_idx) thread
      : src_ld(src_ld_),
        bi(thread_idx / per_row),
        bj(n_reads * (thread_idx % per_row)),
        dst(dst_ + bi * stride + bj),
        src(src_ + bi * src_ld + bj) {}

  void load_unsafe() const thread {
    STEEL_PRAGMA_UNROLL
    for (short j = 0; j < n_reads; j++) dst[j] = src[j];
  }
  void load_safe(short2 size) const thread {
    for (short j = 0; j < n_reads; j++) {
      const bool inside = bi < size.y && bj + j < size.x;
      dst[j] = inside ? src[j] : T(0);
    }
  }
  void next(const int by) thread { src += by; }
};

template <typename T>
struct TransformBias {
  float bias;
  float apply(float x) const thread { return x + bias; }
};

template <typename T, int BM, int BN, int BK>
[[kernel, max_total_threads_per_threadgroup(128)]] void matrix_product(
    const device T* A [[buffer(0)]], const device T* B [[buffer(1)]], device T* D [[buffer(2)]],
    const device T* bias [[buffer(3)]], const constant GEMMParams* params [[buffer(4)]],
    uint simd_group_id [[simdgroup_index_in_threadgroup]], uint thread_idx [[thread_index_in_threadgroup]],
    uint simd_lane_id [[thread_index_in_simdgroup]], uint3 tid [[threadgroup_position_in_grid]]) {
  using LoaderA = BlockLoader<T, BM, BK, 128>;
  using LoaderB = BlockLoader<T, BK, BN, 128>;
  threadgroup T As[BM * LoaderA::stride];
  threadgroup T Bs[BK * LoaderB::stride];
  threadgroup float Cs[BM * BN];

  const int row = tid.y * BM, col = tid.x * BN;
  LoaderA loader_a(A + size_t(row) * params->K, params->K, As, thread_idx);
  LoaderB loader_b(B + col, params->N, Bs, thread_idx);
  const short rows = min(BM, params->M - row), cols = min(BN, params->N - col);
  const short sm = 16 * (simd_group_id / 2), sn = 16 * (simd_group_id % 2);

  simdgroup_matrix<float, 8, 8> results[2][2];
  STEEL_PRAGMA_UNROLL
  for (short i = 0; i < 4; i++) results[i / 2][i % 2] = simdgroup_matrix<float, 8, 8>(0.0f);

  for (int k = 0; k < params->K; k += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (align_all) {
      loader_a.load_unsafe();
      loader_b.load_unsafe();
    } else {
      const short depth = align_K ? BK : min(BK, params->K - k);
      loader_a.load_safe(short2(depth, rows));
      loader_b.load_safe(short2(cols, depth));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    STEEL_PRAGMA_UNROLL
    for (short kk = 0; kk < BK; kk += 8) {
      simdgroup_matrix<T, 8, 8> a[2], b[2];
      simdgroup_barrier(mem_flags::mem_none);
      STEEL_PRAGMA_UNROLL
      for (short i = 0; i < 2; i++) {
        simdgroup_load(a[i], As + (sm + 8 * i) * LoaderA::stride + kk, LoaderA::stride);
        simdgroup_load(b[i], Bs + kk * LoaderB::stride + sn + 8 * i, LoaderB::stride);
      }
      simdgroup_barrier(mem_flags::mem_none);
      STEEL_PRAGMA_UNROLL
      for (short i = 0; i < 4; i++) {
        simdgroup_multiply_accumulate(results[i / 2][i % 2], a[i / 2], b[i % 2], results[i / 2][i % 2]);
      }
    }
    loader_a.next(BK);
    loader_b.next(BK * params->N);
  }
  for (short i = 0; i < 4; i++) simdgroup_store(results[i / 2][i % 2], Cs + (sm + i / 2 * 8) * BN + sn + i % 2 * 8, BN);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (short i = thread_idx; i < BM * BN; i += 128) {
    const short r = i / BN, c = i % BN;
    if (!align_MN && (r >= rows || c >= cols)) continue;
    const TransformBias<T> transform{has_bias ? float(bias[col + c]) : 0.0f};
    D[size_t(row + r) * params->N + col + c] = T(transform.apply(Cs[i]));
  }
}

template [[host_name("matrix_product_float")]] [[kernel]] decltype(matrix_product<float, 32, 32, 16>)
    matrix_product<float, 32, 32, 16>;
template [[host_name("matrix_product_half")]] [[kernel]] decltype(matrix_product<half, 32, 32, 16>)
    matrix_product<half, 32, 32, 16>;
