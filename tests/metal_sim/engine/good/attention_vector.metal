// One query per threadgroup. Each simdgroup has every BN-th key and an online softmax; they are merged at the end.
#include <metal_math>
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

constant bool has_mask [[function_constant(20)]];
constant bool causal [[function_constant(21)]];

struct Shape {
  int heads_per_kv;
  int N;
  int position;
  size_t k_stride;
  float scale;
};

template <typename T, int D>
[[kernel]] void attention_vector(const device T* queries [[buffer(0)]], const device T* keys [[buffer(1)]],
                                 const device T* values [[buffer(2)]], device T* out [[buffer(3)]],
                                 constant Shape& shape [[buffer(4)]], const device bool* mask [[buffer(5)]],
                                 uint3 tid [[threadgroup_position_in_grid]],
                                 uint simd_gid [[simdgroup_index_in_threadgroup]],
                                 uint simd_lid [[thread_index_in_simdgroup]]) {
  constexpr int BN = 8;
  constexpr int BD = 32;
  constexpr int per_thread = D / BD;
  typedef float U;
  thread U q[per_thread];
  thread U o[per_thread] = {0};
  threadgroup U outputs[BN * BD];
  threadgroup U max_scores[BN];
  threadgroup U sum_exp_scores[BN];

  const int head = tid.x;
  const int kv_head = head / shape.heads_per_kv;
  queries += head * D + simd_lid * per_thread;
  keys += kv_head * shape.k_stride + simd_gid * D + simd_lid * per_thread;
  values += kv_head * shape.k_stride + simd_gid * D + simd_lid * per_thread;
  for (int j = 0; j < per_thread; j++) q[j] = static_cast<U>(shape.scale) * static_cast<U>(queries[j]);

  U max_score = -INFINITY;
  U sum_exp_score = 0;
  for (int i = simd_gid; i < shape.N; i += BN) {
    bool use_key = true;
    if (causal) use_key = i <= shape.position;
    if (has_mask) use_key = use_key && mask[i];
    if (use_key) {
      U score = 0;
      for (int j = 0; j < per_thread; j++) score += q[j] * static_cast<U>(keys[j]);
      score = simd_sum(score);
      const U new_max = max(max_score, score);
      const U factor = fast::exp(max_score - new_max);
      const U exp_score = fast::exp(score - new_max);
      max_score = new_max;
      sum_exp_score = sum_exp_score * factor + exp_score;
      for (int j = 0; j < per_thread; j++) o[j] = o[j] * factor + exp_score * static_cast<U>(values[j]);
    }
    keys += BN * D;
    values += BN * D;
  }

  if (simd_lid == 0) {
    max_scores[simd_gid] = max_score;
    sum_exp_scores[simd_gid] = sum_exp_score;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  max_score = simd_lid < BN ? max_scores[simd_lid] : -INFINITY;
  const U new_max = simd_max(max_score);
  const U factor = max_score == -INFINITY ? 0 : fast::exp(max_score - new_max);
  sum_exp_score = simd_sum(simd_lid < BN ? sum_exp_scores[simd_lid] * factor : 0);
  const U mine = simd_broadcast(factor, ushort(0));  // of simdgroup 0
  for (int j = 0; j < per_thread; j++) {
    outputs[simd_gid * BD + simd_lid] = o[j];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd_gid == 0) {
      U total = o[j] * mine;
      for (int g = 1; g < BN; g++) total += outputs[g * BD + simd_lid] * simd_shuffle(factor, ushort(g));
      out[head * D + simd_lid * per_thread + j] = static_cast<T>(sum_exp_score == 0 ? total : total / sum_exp_score);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template [[host_name("attention_vector_float_64")]] [[kernel]] decltype(attention_vector<float, 64>)
    attention_vector<float, 64>;
template [[host_name("attention_vector_half_128")]] [[kernel]] decltype(attention_vector<half, 128>)
    attention_vector<half, 128>;
