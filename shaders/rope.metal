// The op rope: norms queries and keys if they have a norm weight, and rotates their first 2R numbers by R angles.
//
// q [B, T, A, D], k [B, T, J, D] and cos, sin [B, T, R] have any strides; output q [B, A, T, D] and k [B, J, T, D];
// norm weights [D], or [A, D] and [J, D] for a norm over all heads of a token, or absent. If keys go to a cache, values
// v [B, T, J, V] go there as well, with a scale or a norm but not rotated; and q_first [B, T, A, W] precedes each head
// of q. Rows of the outputs are contiguous. A simdgroup computes one head of a token. For a norm over all heads, each
// simdgroup sums over all of them: a few loads per lane, from the cache, instead of a second kernel. Grid:
// kRopeSimdgroups heads of tokens per threadgroup, along x: for each token all heads of q, then of k, v and q_first.
#include <metal_stdlib>
using namespace metal;

#include "rows.h"

namespace moe_metal {

// The heads of q, k or v of one token.
template <typename T>
struct RopeHeads {
  device const T* input;
  device const T* weight;
  RopeHeadsParams params;

  float value(uint head, uint i) const thread {
    return params.scale * float(input[head * params.input.head + i * params.input.element]);
  }
  // This lane's part of the sum of squares of a head.
  float squares(uint head, uint lane) const thread {
    float sum = 0;
    for (uint i = lane; i < params.D; i += kSimdgroup) sum += value(head, i) * value(head, i);
    return sum;
  }
  // rsqrt(mean(x^2) + eps) of a head, or of all heads.
  float inv_rms(uint head, uint lane, float eps) const thread {
    if (params.norm == RopeNorm::each_head) return rsqrt(simd_sum(squares(head, lane)) / float(params.D) + eps);
    float sum = 0;
    for (uint h = 0; h < params.count; ++h) sum += squares(h, lane);
    return rsqrt(simd_sum(sum) / (float(params.count) * float(params.D)) + eps);
  }
  float normed(float value, uint head, uint i, float inv_rms) const thread {
    value *= inv_rms;
    if (params.norm_weight == ParameterType::absent) return value;
    return value * load(weight, (params.norm == RopeNorm::all_heads ? head * params.D : 0) + i, params.norm_weight);
  }
};

// A head of one token, its angles, and when it is normalised.
template <typename T>
struct RopeHead {
  RopeHeads<T> heads;
  device const T* cosines;
  device const T* sines;
  uint head;
  bool first, last;
  float inv_rms;

  // Before the rotation.
  float value(uint i) const thread {
    const float value = heads.value(head, i);
    return first ? heads.normed(value, head, i, inv_rms) : value;
  }
  float2 rotated(uint i, constant RopeParams& params) const thread {
    const float a = value(params.interleaved ? 2 * i : i);
    const float b = value(params.interleaved ? 2 * i + 1 : heads.params.R + i);
    const float c = load(cosines, i * params.cos.element, params.cos_type);
    const float s = load(sines, i * params.sin.element, params.sin_type);
    return float2(a * c - b * s, b * c + a * s);
  }
  float result(float rotated, uint i) const thread { return last ? heads.normed(rotated, head, i, inv_rms) : rotated; }
};

template <typename T>
void rope_head(RopeHeads<T> heads, uint number, device const T* cosines, device const T* sines, device T* output,
               uint lane, constant RopeParams& params) {
  const uint D = heads.params.D, R = heads.params.R;
  const bool norms = heads.params.norm != RopeNorm::none;
  RopeHead<T> head = {heads, cosines, sines, number, norms && !params.norms_last, norms && params.norms_last, 1};
  if (head.first) head.inv_rms = heads.inv_rms(number, lane, params.eps);
  if (head.last) {
    float sum = 0;
    for (uint i = lane; i < R; i += kSimdgroup) {
      const float2 pair = head.rotated(i, params);
      sum += dot(pair, pair);
    }
    for (uint i = 2 * R + lane; i < D; i += kSimdgroup) sum += head.value(i) * head.value(i);
    head.inv_rms = rsqrt(simd_sum(sum) / float(D) + params.eps);
  }
  for (uint i = lane; i < R; i += kSimdgroup) {
    const float2 pair = head.rotated(i, params);
    const uint a = params.pairs_stay ? 2 * i : i, b = params.pairs_stay ? 2 * i + 1 : R + i;
    output[a] = T(head.result(pair.x, a));
    output[b] = T(head.result(pair.y, b));
  }
  for (uint i = 2 * R + lane; i < D; i += kSimdgroup) output[i] = T(head.result(head.value(i), i));
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

// One head of these, for one token.
template <typename T>
void rope_heads(device const T* input, device const T* weight, device T* output, RopeHeadsParams heads, ulong b,
                ulong t, uint head, device const T* cosines, device const T* sines, uint lane,
                constant RopeParams& params) {
  const RopeHeads<T> of_token = {input + row_of(heads.input, b, t, 0), weight, heads};
  rope_head(of_token, head, cosines, sines, output + row_of(heads.output, b, t, head), lane, params);
}

template <typename T>
[[kernel]] void rope(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
                     device const T* q_first [[buffer(3)]], device const T* cosines [[buffer(4)]],
                     device const T* sines [[buffer(5)]], device const T* q_norm_weight [[buffer(6)]],
                     device const T* k_norm_weight [[buffer(7)]], device const T* v_norm_weight [[buffer(8)]],
                     device T* q_output [[buffer(9)]], device T* k_output [[buffer(10)]],
                     device T* v_output [[buffer(11)]], device T* q_first_output [[buffer(12)]],
                     constant RopeParams& params [[buffer(13)]], uint group [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]]) {
  const uint item = group * kRopeSimdgroups + thread_index / kSimdgroup, lane = thread_index % kSimdgroup;
  if (item >= params.items) return;
  const uint A = params.q.count, AJ = A + params.k.count, AJV = AJ + params.v.count, heads = AJV + params.q_first.count;
  const uint token = item / heads, head = item % heads;
  const ulong b = token / params.T, t = token % params.T;
  cosines = further(cosines, b * params.cos.sequence + t * params.cos.row, params.cos_type);
  sines = further(sines, b * params.sin.sequence + t * params.sin.row, params.sin_type);
  if (head < A) {
    rope_heads(q, q_norm_weight, q_output, params.q, b, t, head, cosines, sines, lane, params);
  } else if (head < AJ) {
    rope_heads(k, k_norm_weight, k_output, params.k, b, t, head - A, cosines, sines, lane, params);
  } else if (head < AJV) {
    rope_heads(v, v_norm_weight, v_output, params.v, b, t, head - AJ, cosines, sines, lane, params);
  } else {
    rope_heads(q_first, q, q_first_output, params.q_first, b, t, head - AJV, cosines, sines, lane, params);
  }
}

}  // namespace moe_metal

instantiate_dtypes("rope", rope)
