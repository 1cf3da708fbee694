// Logits are float, whatever the dtypes. There are four ways to compute them. In each, the order of additions depends
// neither on the threads nor on the other tokens.
//   dots     any dtype. With AVX-512 for few tokens; without it, panels multiply many
//   tiles    bfloat16: some tokens with AMX, or with AVX512-BF16 if there is no norm
//   vectors  bfloat16: many tokens of each thread with AVX512-BF16, if there is no norm
//   blocks   many tokens, with AVX-512: oneDNN's brgemm in float, or with AMX in bfloat16
// plan.h chooses. Only between tiles and vectors does that depend on the number of threads; they give the same bits.
#include "cpu/gate/gate_dots.h"
#include "cpu/plan.h"
#include "ops.h"
#ifdef MOE_METAL_HAS_AVX512
#include "cpu/gate/gate_blocks.h"
#include "cpu/gate/gate_tiles.h"
#include "cpu/gate/gate_vectors.h"
#endif

namespace moe_metal {
namespace {

#ifdef MOE_METAL_HAS_AVX512
void gate_by(GateWay way, const Gate& call) {
  switch (way) {
    case GateWay::bfloat16_blocks:
      return gate_by_blocks<at::BFloat16>(call);
    case GateWay::float_blocks:
      return gate_by_blocks<float>(call);
    case GateWay::tiles:
      return gate_by_tiles(call);
    case GateWay::vectors:
      return gate_by_vectors(call);
    case GateWay::dots:
      return gate_by_dots(call);
  }
}
#else
void gate_by(GateWay, const Gate& call) { gate_by_dots(call); }
#endif

}  // namespace

void cpu::run_gate(const Gate& given) {
  Gate call = given;
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  gate_by(gate_way(call), call);
}

}  // namespace moe_metal
