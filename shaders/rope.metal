// The op rope: norms queries and keys if they have a norm weight, and rotates their first 2R numbers by R angles.
//
// q [B, T, A, D], k [B, T, J, D] and cos, sin [B, T, R] have any strides; output q [B, A, T, D] and k [B, J, T, D];
// norm weights [D], or [A, D] and [J, D] for a norm over all heads of a token, or absent. Values v [B, T, J, V], if
// there are any, are copied: they go to the cache together with the keys. Rows of the outputs are contiguous. A
// simdgroup computes one head of a token. For a norm over all heads, each simdgroup sums over all of them: a few loads
// per lane, from the cache, instead of a second kernel. Grid: kRopeSimdgroups heads of tokens per threadgroup, along x:
// for each token all heads of q, then all of k, then all of v.
#include <metal_stdlib>
using namespace metal;

#include "rows.h"

namespace moe_metal {

// The heads of q or of k of one token.
template <typename T>
struct RopeHeads {
  device const T* input;
  device const T* weight;
  ulong head_stride, element_stride;
  uint count, D;
  ParameterType weight_type;
  uint norms_all;

  float value(uint head, uint i) const thread { return float(input[head * head_stride + i * element_stride]); }

  // This lane's part of the sum of squares of a head.
  float squares(uint head, uint lane) const thread {
    float sum = 0;
    for (uint i = lane; i < D; i += kSimdgroup) sum += value(head, i) * value(head, i);
    return sum;
  }
  // rsqrt(mean(x^2) + eps) of a head, or of all heads; 1 without a norm.
  float inv_rms(uint head, uint lane, float eps) const thread {
    if (weight_type == ParameterType::absent) return 1;
    if (!norms_all) return rsqrt(simd_sum(squares(head, lane)) / float(D) + eps);
    float sum = 0;
    for (uint h = 0; h < count; ++h) sum += squares(h, lane);
    return rsqrt(simd_sum(sum) / (float(count) * float(D)) + eps);
  }
  float normed(uint head, uint i, float inv_rms) const thread {
    if (weight_type == ParameterType::absent) return value(head, i);
    return value(head, i) * inv_rms * load(weight, (norms_all ? head * D : 0) + i, weight_type);
  }
};

template <typename T>
void rope_head(RopeHeads<T> heads, uint head, device const T* cosines, device const T* sines, device T* output,
               uint lane, constant RopeParams& params) {
  const uint D = params.D, R = params.R;
  const float inv_rms = heads.inv_rms(head, lane, params.eps);
  for (uint i = lane; i < R; i += kSimdgroup) {
    const float a = heads.normed(head, params.interleaved ? 2 * i : i, inv_rms);
    const float b = heads.normed(head, params.interleaved ? 2 * i + 1 : R + i, inv_rms);
    const float c = load(cosines, i * params.cos.element, params.cos_type);
    const float s = load(sines, i * params.sin.element, params.sin_type);
    output[i] = T(a * c - b * s);
    output[R + i] = T(b * c + a * s);
  }
  for (uint i = 2 * R + lane; i < D; i += kSimdgroup) output[i] = T(heads.normed(head, i, inv_rms));
}

// values + elements, for a parameter of either type.
template <typename T>
device const T* further(device const T* values, ulong elements, ParameterType type) {
  if (type != ParameterType::float32) return values + elements;
  return reinterpret_cast<device const T*>(reinterpret_cast<device const float*>(values) + elements);
}

ulong row_of(AttentionStrides strides, ulong b, ulong t, ulong head) {
  return b * strides.sequence + t * strides.row + head * strides.head;
}

template <typename T>
[[kernel]] void rope(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
                     device const T* cosines [[buffer(3)]], device const T* sines [[buffer(4)]],
                     device const T* q_norm_weight [[buffer(5)]], device const T* k_norm_weight [[buffer(6)]],
                     device T* q_output [[buffer(7)]], device T* k_output [[buffer(8)]],
                     device T* v_output [[buffer(9)]], constant RopeParams& params [[buffer(10)]],
                     uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint item = group * kRopeSimdgroups + thread_index / kSimdgroup, lane = thread_index % kSimdgroup;
  if (item >= params.items) return;
  const uint A = params.A, J = params.J, D = params.D, heads = A + J + (params.V > 0 ? J : 0);
  const uint token = item / heads, head = item % heads;
  const ulong b = token / params.T, t = token % params.T;
  if (head >= A + J) {
    const uint j = head - A - J;
    v += row_of(params.v, b, t, j);
    v_output += row_of(params.v_output, b, t, j);
    for (uint i = lane; i < params.V; i += kSimdgroup) v_output[i] = v[i * params.v.element];
    return;
  }
  cosines = further(cosines, b * params.cos.sequence + t * params.cos.row, params.cos_type);
  sines = further(sines, b * params.sin.sequence + t * params.sin.row, params.sin_type);
  if (head < A) {
    const RopeHeads<T> heads = {q + b * params.q.sequence + t * params.q.row,
                                q_norm_weight,
                                params.q.head,
                                params.q.element,
                                A,
                                D,
                                params.q_norm_weight,
                                params.q_norms_all};
    rope_head(heads, head, cosines, sines, q_output + row_of(params.q_output, b, t, head), lane, params);
  } else {
    const uint j = head - A;
    const RopeHeads<T> heads = {k + b * params.k.sequence + t * params.k.row,
                                k_norm_weight,
                                params.k.head,
                                params.k.element,
                                J,
                                D,
                                params.k_norm_weight,
                                params.k_norms_all};
    rope_head(heads, j, cosines, sines, k_output + row_of(params.k_output, b, t, j), lane, params);
  }
}

}  // namespace moe_metal

instantiate_dtypes("rope", rope)
