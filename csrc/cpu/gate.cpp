// The logits are float from the products on, whatever the dtypes, and come in one of three ways, all of which add in an
// order that neither the threads nor the other tokens change:
//   dots     few tokens, any dtype: experts shared out among threads
//   tiles    some tokens in bfloat16, on processors with AMX
//   blocks   many tokens, on AVX-512: oneDNN's brgemm, in float, or with AMX in bfloat16
#include "gate_blocks.h"
#include "gate_dots.h"
#include "gate_tiles.h"
#include "ops.h"

namespace moe_metal {
namespace {

// Where the ways meet, with E = 128 and H = 2048 on 2 cores: tiles for dots at T = 8 take 14 us for 38, blocks for
// tiles at 1024 391 for 467, and float blocks for dots at 64 239 for 305.
void gate_by_the_best_way(const Gate& call) {
#ifdef MOE_METAL_AMX  // AVX-512 on Linux
  const bool bfloat16 = call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16;
  if (call.T > 4 && bfloat16 && tiles_available()) {
    // oneDNN may be kept from AMX, by torch.backends.mkldnn or by ONEDNN_MAX_CPU_ISA.
    const bool pairs = call.H % 2 == 0 && !call.norm_weight.defined() && at::native::cpublas::could_pack(at::kBFloat16);
    return pairs && call.T > 256 ? gate_by_blocks<at::BFloat16>(call) : gate_by_tiles(call);
  }
  if (call.T > 32) return gate_by_blocks<float>(call);
#endif
  gate_by_dots(call);
}

}  // namespace

void run_gate(Gate& call) {
  for (Tensor* small : {&call.norm_weight, &call.router_bias, &call.select_bias, &call.per_expert_scale}) {
    if (small->defined()) *small = small->to(at::kFloat);
  }
  gate_by_the_best_way(call);
}

}  // namespace moe_metal
