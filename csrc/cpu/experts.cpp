// The whole expert FFN of a MoE layer and its combine: see `experts` in torch_moe_metal/reference.py.
//
// There are two passes. Each weight is read once, in place, by one thread:
//   1. inner[slot, i] = act(gate_up[e] @ x[t] + bias)      items: a few kRows rows of an expert's inner
//   2. output[t, h]   = sum over slots of weight * (down[e] @ inner[slot] + bias)
//                       + sigmoid(shared_gate) * shared + residual        items: a few kRows columns of the output
// Sums are float and are rounded once, at the end. There are three ways to multiply:
//   dots     any dtype, strides and processor. If experts have many tokens, weights are transposed in cache.
//            Scratch: T * K * I floats for inner, and T * H for x as float.
//   columns  few tokens, and weights with contiguous columns: items are ranges of columns. Additional scratch: the sums
//            of each range, T * K * (H / kPart * 2I + I / kPart * H) floats.
//   tiles    bfloat16 with AMX, or AVX512-BF16 of AMD. inner and packed weights are rounded to bfloat16.
//            Scratch: 2 * (H + I) bytes for each slot; the slots of each expert are rounded up to 16.
// All ways also keep the sums of one block of the output per thread: up to T * 128 floats.
#include "cpu/experts/experts_columns.h"
#include "cpu/experts/experts_dots.h"
#include "cpu/plan.h"
#include "ops.h"
#ifdef MOE_METAL_HAS_AVX512
#include "cpu/experts/experts_tiles.h"
#endif

namespace moe_metal {

void cpu::run_experts(const Experts& given) {
  Experts call = given;
  call.weights = as_float(call.weights);
  call.shared_gate = as_float(call.shared_gate);
  const Slots slots(call.ids, call.E);
  const ExpertsWay way = experts_way(call, static_cast<int64_t>(slots.order.size()), slots.used());
#ifdef MOE_METAL_HAS_AVX512
  if (way == ExpertsWay::tiles) return experts_by_tiles(call, slots);
#endif
  with_dtype(call.x.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    way == ExpertsWay::columns ? experts_by_columns<Scalar>(call, slots) : experts_by_dots<Scalar>(call, slots);
  });
}

}  // namespace moe_metal
