// The list of ops, and what an op consists of.
//
// The contract of an op is in csrc/contract/: its schema, schema_<op>; a struct of its checked arguments, the "call";
// and check_<op>, which fills it and allocates the outputs. Tensors in a call are contiguous (weights are never copied:
// the call has their strides), and absent optional tensors are undefined. A kernel, cpu::run_<op> or mps::run_<op>,
// computes a call without changing it, so a call can be computed again. arguments.h explains the shape letters.
//
// The registration of schemas, of kernels and of checks for fake tensors, the refusal of autograd, and the versions of
// tensors that are written in place follow from the list.
#pragma once
#include "contract/attention.h"
#include "contract/combine.h"
#include "contract/experts.h"
#include "contract/linear_attention.h"
#include "contract/router.h"
#include "contract/short_conv.h"
#include "contract/weights.h"

// In the order of torch_moe_metal/reference.py.
#define MOE_METAL_OPS(op)                                                                                            \
  op(gate) op(route) op(glu) op(experts) op(linear) op(dequantize) op(weighted_sum) op(weighted_sum_residual_)       \
      op(weighted_sum_residual_norm_) op(weighted_sum_norm_add) op(weighted_sum_dual_norm_add) op(norm) op(norm_add) \
          op(residual_norm) op(rope) op(attention) op(linear_attention_) op(short_conv_)

namespace moe_metal {

// An op, made of its check and a kernel: Op<check_gate>::call<cpu::run_gate> is what PyTorch calls for gate on the CPU.
template <auto check>
struct Op;

template <class Checked, class... Args, Checked (*check)(Args...)>
struct Op<check> {
  using Call = Checked;
  static constexpr auto checked = check;

  template <void (*kernel)(const Call&)>
  static void run(const Call& call) {
    if (!call.is_empty()) kernel(call);
    if constexpr (requires { call.done(); }) call.done();
  }
  template <void (*kernel)(const Call&)>
  static auto call(Args... args) {
    const Call call = check(args...);
    run<kernel>(call);
    return call.outputs();
  }
};

#define MOE_METAL_DECLARE_KERNEL(name) void run_##name(const Op<check_##name>::Call& call);
namespace cpu {
MOE_METAL_OPS(MOE_METAL_DECLARE_KERNEL)
}
namespace mps {
MOE_METAL_OPS(MOE_METAL_DECLARE_KERNEL)
}

}  // namespace moe_metal
