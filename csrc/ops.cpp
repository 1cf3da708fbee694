// The schemas of all ops.
// An op's maths is in torch_moe_metal/reference.py, its checks in contract.h, its kernels in cpu/<op>.cpp and
// mps/<op>.mm; norm shares the files of norm_add.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "contract.h"

#define ROUTING                                                                       \
  "int top_k, str scoring='softmax', str renormalize='before_scale', int n_group=1, " \
  "int topk_group=1, str group_score='top2_sum', float scaling_factor=1.0, float softcap=0.0"
#define ACTIVATION "str activation='silu', float alpha=1.702, float? limit=None"

namespace moe_metal {
namespace {

constexpr const char* kSchemas[] = {
    "gate(Tensor hidden, Tensor router_weight, Tensor? norm_weight=None, Tensor? router_bias=None, "
    "Tensor? select_bias=None, Tensor? per_expert_scale=None, *, " ROUTING
    ", float eps=1e-6) -> (Tensor weights, Tensor ids)",

    "route(Tensor logits, Tensor? select_bias=None, Tensor? per_expert_scale=None, *, " ROUTING
    ") -> (Tensor weights, Tensor ids)",

    "glu(Tensor gate, Tensor up, *, " ACTIVATION ") -> Tensor",

    "experts(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, Tensor? shared=None, Tensor? shared_gate=None, Tensor? residual=None, "
    "Tensor? gate_up_scale=None, Tensor? gate_up_offset=None, Tensor? down_scale=None, Tensor? down_offset=None, "
    "*, " ACTIVATION
    ", bool interleaved=False, bool transposed=False, str format='dense', "
    "str? down_format=None, int group_size=0) -> Tensor",

    "linear(Tensor x, Tensor weight, Tensor? scale=None, Tensor? offset=None, Tensor? bias=None, *, "
    "str format='dense', int group_size=0) -> Tensor",
    "dequantize(Tensor weight, Tensor? scale=None, Tensor? offset=None, *, str format, int bits=4, "
    "ScalarType dtype) -> Tensor",

    "weighted_sum(Tensor slots, Tensor weights, Tensor? shared=None, Tensor? shared_gate=None, "
    "Tensor? residual=None) -> Tensor",
    "weighted_sum_residual_(Tensor(a!) residual, Tensor slots, Tensor weights) -> ()",
    "weighted_sum_residual_norm_(Tensor(a!) residual, Tensor slots, Tensor weights, Tensor norm_weight, *, "
    "float eps=1e-6) -> Tensor",
    "weighted_sum_norm_add(Tensor slots, Tensor weights, Tensor residual, Tensor norm_weight, *, "
    "float eps=1e-6) -> Tensor",
    "weighted_sum_dual_norm_add(Tensor slots, Tensor weights, Tensor residual, Tensor residual_norm_weight, "
    "Tensor moe_norm_weight, *, float eps=1e-6) -> Tensor",

    "norm(Tensor input, Tensor? weight=None, *, float eps=1e-6) -> Tensor",
    "norm_add(Tensor residual, Tensor input, Tensor weight, Tensor? scalar=None, *, float eps=1e-6) -> Tensor",
    "residual_norm(Tensor residual, Tensor input, Tensor weight, Tensor? scalar=None, *, float eps=1e-6) "
    "-> (Tensor output, Tensor sum)",

    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, "
    "float eps=1e-6, bool interleaved=False) -> (Tensor q, Tensor k)",
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? sinks=None, *, float? scale=None, "
    "bool causal=False, int window=0, float softcap=0.0) -> Tensor",
};

std::string op_name(const std::string& schema) { return schema.substr(0, schema.find('(')); }

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// These ops have no backward and no jvp. Without this kernel PyTorch would silently drop the gradient or the tangent.
// PyTorch itself hides tangents if forward-mode AD is off, as in inference mode.
void no_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const auto& tensor = arguments[i].toTensor();
    TORCH_CHECK(!c10::GradMode::is_enabled() || !tensor.requires_grad(), schema.name(), ": ",
                schema.arguments()[i].name(),
                ": expected a tensor that does not require grad, since this op has no backward; got one that does. "
                "Call it under torch.no_grad(), or pass tensor.detach()");
    TORCH_CHECK(!tensor._fw_grad(/*level=*/0).defined(), schema.name(), ": ", schema.arguments()[i].name(),
                ": expected a tensor without a tangent (forward-mode AD), since this op has no jvp; got one with a "
                "tangent. Pass tensor.detach()");
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// An in-place op bumps the version of the tensor, so that autograd notices the write. Inference mode skips Autograd,
// but this key only if all tensors are inference tensors. The guard keeps ops called by the kernel from bumping it
// again.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (writes(schema.arguments()[i])) arguments[i].toTensor().unsafeGetTensorImpl()->bump_version();
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Called if no backend has a kernel: no tensor was given, or one is sparse, quantised or on another device.
void no_backend(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) continue;
    const auto& tensor = arguments[i].toTensor();
    const auto prefix = c10::str(schema.name(), ": ", schema.arguments()[i].name(), ": ");
    TORCH_CHECK(tensor.defined(), prefix, "expected a tensor, got None");
    const auto key = c10::legacyExtractDispatchKey(tensor.key_set());
    TORCH_CHECK_NOT_IMPLEMENTED(key == c10::DispatchKey::CPU || key == c10::DispatchKey::MPS, prefix,
                                "expected a dense tensor on cpu or mps, got one of ", key);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, schema.name(), ": expected dense tensors on cpu or mps, got ", keys);
}

}  // namespace
}  // namespace moe_metal

// Python reads these with ctypes: the limit on E, and as JSON the groups of affine weights and the table of formats.
extern "C" C10_EXPORT const int32_t moe_metal_max_experts = moe_metal::kMaxExperts;
extern "C" C10_EXPORT const char* moe_metal_formats() {
  static const std::string table = [] {
    constexpr auto name_of = [](auto value) { return moe_metal::kNames<decltype(value)>[static_cast<int>(value)]; };
    std::string rows;
    for (const auto& format : moe_metal::kFormats) {
      rows += c10::str(rows.empty() ? "" : ",", "{\"name\":\"", format.name, "\",\"library\":\"", format.library,
                       "\",\"bits\":", format.bits, ",\"columns\":", format.columns, ",\"bytes\":", format.bytes,
                       ",\"scale\":\"", name_of(format.scale), "\",\"scale_columns\":", format.scale_columns,
                       ",\"scale_rows\":", format.scale_rows, ",\"offset\":\"", name_of(format.offset), "\"}");
    }
    return c10::str("{\"affine_groups\":[", c10::Join(",", moe_metal::kAffineGroups), "],\"rows\":[", rows, "]}");
  }();
  return table.c_str();
}

TORCH_LIBRARY(moe_metal, m) {
  m.set_python_module("torch_moe_metal");
  for (const char* schema : moe_metal::kSchemas) m.def(schema, {at::Tag::pt2_compliant_tag});
}

// Every op's checks without its work. The fake functions of torch.compile and torch.export call them; those functions
// are in Python because the checks do not support symbolic sizes.
TORCH_LIBRARY(moe_metal_checks, m) {
  for (const char* schema : moe_metal::kSchemas) m.def(schema, {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(moe_metal_checks, CompositeExplicitAutograd, m) {  // for Meta, and for calls without a tensor
  constexpr auto nothing = [](auto&) {};
  m.impl("gate", &moe_metal::gate<nothing>);
  m.impl("route", &moe_metal::route<nothing>);
  m.impl("glu", &moe_metal::glu<nothing>);
  m.impl("experts", &moe_metal::experts<nothing>);
  m.impl("linear", &moe_metal::linear<nothing>);
  m.impl("dequantize", &moe_metal::dequantize<nothing>);
  m.impl("weighted_sum", &moe_metal::weighted_sum<nothing>);
  m.impl("weighted_sum_residual_", &moe_metal::weighted_sum_residual_<nothing>);
  m.impl("weighted_sum_residual_norm_", &moe_metal::weighted_sum_residual_norm_<nothing>);
  m.impl("weighted_sum_norm_add", &moe_metal::weighted_sum_norm_add<nothing>);
  m.impl("weighted_sum_dual_norm_add", &moe_metal::weighted_sum_dual_norm_add<nothing>);
  m.impl("norm", &moe_metal::norm<nothing>);
  m.impl("norm_add", &moe_metal::norm_add<nothing>);
  m.impl("residual_norm", &moe_metal::residual_norm<nothing>);
  m.impl("rope", &moe_metal::rope<nothing>);
  m.impl("attention", &moe_metal::attention<nothing>);
}

TORCH_LIBRARY_IMPL(moe_metal, Autograd, m) {
  for (const char* schema : moe_metal::kSchemas) {
    m.impl(moe_metal::op_name(schema).c_str(), torch::CppFunction::makeFromBoxedFunction<&moe_metal::no_autograd>());
  }
}

TORCH_LIBRARY_IMPL(moe_metal, CompositeExplicitAutograd, m) {
  for (const char* schema : moe_metal::kSchemas) {
    m.impl(moe_metal::op_name(schema).c_str(), torch::CppFunction::makeFromBoxedFunction<&moe_metal::no_backend>());
  }
}

TORCH_LIBRARY_IMPL(moe_metal, ADInplaceOrView, m) {
  for (const char* schema : moe_metal::kSchemas) {
    const auto name = moe_metal::op_name(schema);
    if (name.back() == '_') {
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&moe_metal::bump_versions>());
    }
  }
}
