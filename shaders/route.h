// Selects the K experts of one token from its logits and computes their weights, by one simdgroup, in registers.
// Lane l has N logits, of the experts l, l + 32, ... All 32 lanes are active at every simd function. Loops over N are
// unrolled, so that every index is a constant; otherwise arrays may be in memory instead of registers.
#pragma once
#include "common.h"
#include "maths.h"
#include "rows.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ order

// Integers that sort like the values. NaN sorts below -infinity. 0 means absent or already taken.
MOE_METAL_CONSTANT uint kNothing = 0;
MOE_METAL_CONSTANT uint kNan = 1;

inline uint sort_key(float value) {
  const uint bits = as_type<uint>(value), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return kNan;
  if (magnitude == 0) return 0x80000000;  // -0 equals 0
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

inline float sort_value(uint key) {
  if (key == kNan) return NAN;
  return as_type<float>(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

struct Best {
  uint key, id;
};

// Removes and returns the highest key of all lanes; among equal keys, the one with the lowest id.
template <uint N>
Best take_best(thread uint* keys, uint lane) {
  Best best = {keys[0], lane};
#pragma clang loop unroll(full)
  for (uint n = 1; n < N; ++n) {
    if (keys[n] > best.key) {
      best.key = keys[n];
      best.id = lane + n * kSimdgroup;
    }
  }
  const uint key = simd_max(best.key);
  const uint id = simd_min(best.key == key ? best.id : ~0u);
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    if (id == lane + n * kSimdgroup) keys[n] = kNothing;
  }
  return {key, id};
}

// ------------------------------------------------------------------------------------------ scores

// Converts logits to scores.
template <uint N>
void to_scores(thread const float* logits, thread float* scores, uint lane, RoutingParams params) {
  float highest = -INFINITY, total = 0;
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    const float logit = logits[n];
    scores[n] = params.softcap == 0 ? logit : params.softcap * precise::tanh(logit / params.softcap);
    if (lane + n * kSimdgroup < uint(params.experts)) highest = max(highest, scores[n]);
  }
  if (params.scoring != Scoring::softmax) {
#pragma clang loop unroll(full)
    for (uint n = 0; n < N; ++n) {
      scores[n] = params.scoring == Scoring::sigmoid ? sigmoid(scores[n]) : sqrt_softplus(scores[n]);
    }
    return;
  }
  highest = simd_max(highest);
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    scores[n] = exp(scores[n] - highest);
    if (lane + n * kSimdgroup < uint(params.experts)) total += scores[n];
  }
  total = simd_sum(total);
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) scores[n] /= total;
}

// ------------------------------------------------------------------------------------------ groups

// The score of the group of experts first to last - 1: the value of its highest key, or the sum of its two highest.
template <uint N>
float group_value(thread const uint* keys, uint lane, uint first, uint last, GroupScore score) {
  uint high = kNothing, next = kNothing;
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    const uint expert = lane + n * kSimdgroup, key = first <= expert && expert < last ? keys[n] : kNothing;
    next = max(next, min(key, high));
    high = max(high, key);
  }
  const uint key = simd_max(high);
  if (score == GroupScore::max || last - first == 1) return sort_value(key);
  const uint owner = simd_min(high == key ? lane : ~0u);
  return sort_value(key) + sort_value(simd_max(lane == owner ? next : high));
}

// Removes the keys of experts outside the best groups. `choice` has the keys that determine the scores of groups.
template <uint N>
void keep_best_groups(thread const uint* choice, thread uint* keys, uint lane, RoutingParams params) {
  const uint size = params.experts / params.n_group;
  uint groups[N];  // group g is at the index of expert g
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) groups[n] = kNothing;
  for (uint group = 0; group < uint(params.n_group); ++group) {
    const uint key = sort_key(group_value<N>(choice, lane, group * size, (group + 1) * size, params.group_score));
#pragma clang loop unroll(full)
    for (uint n = 0; n < N; ++n) {
      if (group == lane + n * kSimdgroup) groups[n] = key;
    }
  }
  uint kept = 0;  // bit n: this lane's group n is kept
  for (int i = 0; i < params.topk_group; ++i) {
    const uint id = take_best<N>(groups, lane).id;
    if (id % kSimdgroup == lane) kept |= 1u << (id / kSimdgroup);
  }
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    const uint group = (lane + n * kSimdgroup) / size;
    const uint word = simd_shuffle(kept, ushort(group % kSimdgroup));
    if (!(word >> (group / kSimdgroup % 32) & 1)) keys[n] = kNothing;
  }
}

// ------------------------------------------------------------------------------------------ weights

struct Choice {
  uint expert;
  float weight;
};

// Takes the next `count` best experts, one per lane, best first.
template <uint N>
Choice choose(thread uint* keys, thread const float* scores, uint count, uint lane) {
  Choice chosen = {0, 0};
  for (uint i = 0; i < count; ++i) {
    const uint winner = take_best<N>(keys, lane).id;
    if (lane == i) chosen.expert = winner;
  }
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    const float score = simd_shuffle(scores[n], ushort(chosen.expert % kSimdgroup));
    if (chosen.expert / kSimdgroup == n) chosen.weight = score;
  }
  return chosen;
}

template <typename T>
float expert_scale(device const T* per_expert_scale, uint expert, RouteParams params) {
  if (params.per_expert_scale == ParameterType::absent) return 1;
  return load(per_expert_scale, expert, params.per_expert_scale);
}

template <typename T>
float final_weight(Choice chosen, float total, device const T* per_expert_scale, RouteParams params) {
  float weight = chosen.weight;
  if (params.routing.renormalize != Renormalize::none) weight /= total + params.routing.sum_eps;
  if (params.routing.renormalize != Renormalize::after_scale) {
    weight *= expert_scale(per_expert_scale, chosen.expert, params);
  }
  return weight * params.routing.scaling_factor;
}

// ------------------------------------------------------------------------------------------ routing

// Logits past the last expert are ignored. select_bias and per_expert_scale are [E] of either type, or absent; weights
// and ids are this token's rows of K.
template <uint N, typename T>
void route_token(thread const float* logits, device const T* select_bias, device const T* per_expert_scale,
                 device float* weights, device int* ids, uint lane, RouteParams params) {
  const RoutingParams routing = params.routing;
  const bool biased = params.select_bias != ParameterType::absent;
  float scores[N];
  to_scores<N>(logits, scores, lane, routing);
  uint keys[N], choice[N];
#pragma clang loop unroll(full)
  for (uint n = 0; n < N; ++n) {
    const uint expert = lane + n * kSimdgroup;
    const bool inside = expert < uint(routing.experts);
    const float bias = inside && biased ? load(select_bias, expert, params.select_bias) : 0;
    choice[n] = inside ? sort_key(scores[n] + bias) : kNothing;
    keys[n] = biased || !inside ? choice[n] : sort_key(logits[n]);
  }
  if (routing.n_group > 1) keep_best_groups<N>(choice, keys, lane, routing);

  const bool scale_first = routing.renormalize == Renormalize::after_scale;
  const uint K = routing.top_k, last = (K - 1) / kSimdgroup * kSimdgroup;
  Choice chosen;
  float total = 0;
  for (uint first = 0; first < K; first += kSimdgroup) {  // lane l gets the winner first + l
    chosen = choose<N>(keys, scores, min(K - first, uint(kSimdgroup)), lane);
    if (first + lane < K) {
      if (scale_first) chosen.weight *= expert_scale(per_expert_scale, chosen.expert, params);
      total += chosen.weight;
      ids[first + lane] = int(chosen.expert);
      if (first < last) weights[first + lane] = chosen.weight;  // the last 32 stay in registers
    }
  }
  total = simd_sum(total);
  for (uint k = lane; k < last; k += kSimdgroup) {  // each lane reads back its own values
    weights[k] = final_weight({uint(ids[k]), weights[k]}, total, per_expert_scale, params);
  }
  if (last + lane < K) weights[last + lane] = final_weight(chosen, total, per_expert_scale, params);
}

}  // namespace moe_metal
