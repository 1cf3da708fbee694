// The whole expert FFN of a MoE layer and its combine: see `experts` in torch_moe_metal/reference.py.
//
// There are two passes. Each weight is read once, in place, by one thread:
//   1. inner[slot, i] = act(gate_up[e] @ x[t] + bias)      items: a few kRows rows of an expert's inner
//   2. output[t, h]   = sum over slots of weight * (down[e] @ inner[slot] + bias)
//                       + sigmoid(shared_gate) * shared + residual        items: a few kRows columns of the output
// Sums are float and are rounded once, at the end. There are two ways to multiply, besides those of some processors:
//   dots     any dtype and strides. If experts have many tokens, weights are transposed in cache.
//            Scratch: T * K * I floats for inner, and T * H for x as float.
//   columns  few tokens, and weights with contiguous columns: items are ranges of columns. Additional scratch: the sums
//            of each range, T * K * (H / kPart * 2I + I / kPart * H) floats.
// All ways also keep the sums of one item of the output per thread: up to T * 256 floats.
#include "cpu/experts/experts_columns.h"
#include "cpu/experts/experts_dots.h"
#include "cpu/processor_ways.h"
#include "cpu/read_ahead.h"
#include "ops.h"

namespace moe_metal {

void cpu::run_experts(const Experts& given) {
  Experts call = given;
  call.weights = as_float(call.weights);
  call.shared_gate = as_float(call.shared_gate);
  const Slots slots(call.ids, call.E);
  read_ahead(call, slots.experts);
  const bool columns = experts_fit_columns(call);
  if (const auto way = processor_ways().experts; way && !columns && way(call, slots)) return;
  with_dtype(call.x.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    columns ? experts_by_columns<Scalar>(call, slots) : experts_by_dots<Scalar>(call, slots);
  });
}

}  // namespace moe_metal
