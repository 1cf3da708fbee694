// The CPU kernels. Each is in the file named after its op; contract.h has checked the call.
#pragma once
#include "contract.h"

namespace moe_metal {

void run_gate(Gate& call);
void run_route(Route& call);
void run_glu(const Glu& call);
void run_experts(Experts& call);
void run_linear(const Linear& call);
void run_dequantize(const Dequantize& call);
void run_weighted_sum(WeightedSum& call);
void run_weighted_sum_residual_(WeightedSum& call);
void run_weighted_sum_residual_norm_(WeightedSum& call);
void run_weighted_sum_norm_add(WeightedSum& call);
void run_weighted_sum_dual_norm_add(WeightedSum& call);
void run_norm_add(ResidualNorm& call);  // also runs norm
void run_residual_norm(ResidualNorm& call);
void run_rope(const Rope& call);
void run_attention(const Attention& call);

}  // namespace moe_metal
