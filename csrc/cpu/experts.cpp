// The whole expert FFN of a MoE layer and its combine: see `experts` in torch_moe_metal/reference.py.
//
// Two passes. Every weight is read once, from where it lies, by one thread:
//   1. inner[slot, i] = act(gate_up[e] @ x[t] + bias)      items: kRows rows of an expert's inner
//   2. output[t, h]   = sum over slots of weight * (down[e] @ inner[slot] + bias)
//                       + sigmoid(shared_gate) * shared + residual        items: a few kRows columns of the output
// Sums are float and are rounded once, at the end. Three ways to multiply:
//   dots     any dtype, strides and processor; of experts with many tokens each, weights are transposed in cache.
//            Scratch: T * K * I floats for inner, and T * H for x as float.
//   columns  few tokens, and weights that lie column by column: items are runs of columns. Scratch besides: sums of
//            each run, T * K * (H / kPart * 2I + I / kPart * H) floats.
//   tiles    bfloat16 on processors with AMX, or packed weights with AVX512-BF16; inner and packed weights are rounded
//            to bfloat16. Scratch: 2 * (H + I) bytes for each slot, with the slots of one expert rounded up to 16.
// All also hold the sums of one block of the output per thread: up to T * 128 floats.
#include "experts_columns.h"
#include "experts_dots.h"
#include "experts_tiles.h"
#include "ops.h"

namespace moe_metal {
namespace {

// Few slots, or the partial sums would be large beside the weights.
bool by_columns(const Experts& call) {
  const Weight &gate_up = call.gate_up, &down = call.down;
  return gate_up.format->is_dense() && down.format->is_dense() && gate_up.row == 1 && down.row == 1 &&
         gate_up.gap == 0 && gate_up.column != 1 && down.column != 1 && call.T * call.K <= 256;
}

#ifdef MOE_METAL_AMX
// Tiles read weights as fast as memory gives them even for one token: with H 2048, I 768, E 128, K 8 on 2 cores of a
// Sapphire Rapids, T = 1 takes 3.0 ms by tiles and 3.7 by dots, T = 512 takes 65 and 390. Packed weights are unpacked
// first, which few tokens do not pay for: without AMX, on 2 cores of a Zen 5, affine of 4 bits takes 63 ms by tiles and
// 65 by dots at T = 128, 93 and 159 at 512.
bool by_tiles(const Experts& call, const Slots& used) {
  const int64_t worth_unpacking = tiles_available() ? 8 : 12;  // tokens of an expert
  const bool dense = call.gate_up.format->is_dense();
  return (dense || static_cast<int64_t>(used.order.size()) >= worth_unpacking * used.used()) &&
         inner_may_be_rounded(call) && (tiles_available() || (!dense && bfloat16_available()));
}
#endif

}  // namespace

void run_experts(Experts& call) {
  call.ids = call.ids.to(at::kLong);
  call.weights = call.weights.to(at::kFloat);
  if (call.shared_gate.defined()) call.shared_gate = call.shared_gate.to(at::kFloat);
  const Slots slots(call.ids, call.E);
  if (by_columns(call)) {
    with_dtype(call.x.scalar_type(), [&](auto scalar) { experts_by_columns<decltype(scalar)>(call, slots); });
    return;
  }
#ifdef MOE_METAL_AMX
  if (by_tiles(call, slots)) {
    experts_by_tiles(call, slots);
    return;
  }
#endif
  with_dtype(call.x.scalar_type(), [&](auto scalar) { experts_by_dots<decltype(scalar)>(call, slots); });
}

}  // namespace moe_metal
