// Shared by the shaders (Metal) and the host (C++): every constant, choice and params struct stands here once.
#pragma once
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace moe_metal {

#ifdef __METAL_VERSION__
#define MOE_METAL_CONSTANT constant constexpr
#else
#define MOE_METAL_CONSTANT constexpr
#endif

MOE_METAL_CONSTANT int kMaxExperts = 1024;

enum class Scoring : int32_t { softmax, sigmoid, sqrt_softplus };
enum class Renormalize : int32_t { none, before_scale, after_scale };
enum class GroupScore : int32_t { top2_sum, max };
enum class Activation : int32_t { silu, gelu, gelu_tanh, relu2, swiglu_oai };

// How logits become experts and weights: the routing options of the ops gate and route.
struct RoutingParams {
  int32_t experts;  // E
  int32_t top_k;    // K
  int32_t n_group;
  int32_t topk_group;
  Scoring scoring;
  Renormalize renormalize;
  GroupScore group_score;
  float scaling_factor;
  float softcap;  // 0: none
};

// What stands between the two halves of an expert: the options of the ops glu and experts.
struct ActivationParams {
  Activation activation;
  float alpha;
  float limit;  // +inf: none
};

#ifndef __METAL_VERSION__
static_assert(sizeof(RoutingParams) == 36, "shaders and host must agree");
static_assert(sizeof(ActivationParams) == 12, "shaders and host must agree");
#endif

}  // namespace moe_metal
