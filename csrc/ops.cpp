// Registers what all ops have in common: schemas, checks for fake tensors, and what happens with autograd, with tensors
// that are written in place and without a backend. Each backend registers its kernels in cpu/ops.cpp or mps/ops.mm.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cache_ops.h"
#include "room_class.h"
#include "tape.h"

namespace moe_metal {
namespace {

#define MOE_METAL_SCHEMA(name) std::string(#name) + schema_##name,
std::vector<std::string> schemas() { return {MOE_METAL_OPS(MOE_METAL_SCHEMA)}; }
#define MOE_METAL_CACHE_SCHEMA(name) std::string("_" #name) + schema_##name,
std::vector<std::string> all_schemas() {
  return {MOE_METAL_OPS(MOE_METAL_SCHEMA) MOE_METAL_CACHE_OPS(MOE_METAL_CACHE_SCHEMA)};
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void define(torch::Library& m, const std::vector<std::string>& schemas) {
  for (const std::string& schema : schemas) m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
}

std::string recording_schema(const std::string& schema) { return schema.substr(0, schema.rfind("->")) + "-> int"; }

void define_classes(torch::Library& m) {
  register_room();
  m.class_<Tape>("Tape")
      .def(torch::init<std::vector<OptionalTensor>, std::vector<int64_t>, std::vector<Tensor>>())
      .def("begin", &Tape::begin)
      .def("end", &Tape::end)
      .def("refusal", &Tape::refusal)
      .def("replay", &Tape::replay);
}

bool is_in_place(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), writes);
}

// Registers a boxed kernel for all ops, or for those that `fits` selects.
template <auto kernel>
void register_boxed(torch::Library& m, bool (*fits)(const c10::FunctionSchema&) = nullptr) {
  for (const std::string& text : all_schemas()) {
    const c10::FunctionSchema schema = torch::schema(text.c_str());
    if (!fits || fits(schema)) m.impl(schema.name().c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

// A kernel of the library of checks.
template <class Call>
void nothing(const Call&) {}

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
    if (!writes(schema.arguments()[i]) || arguments[i].isNone()) continue;
    arguments[i].toTensor().unsafeGetTensorImpl()->bump_version();
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
  moe_metal::define_classes(m);  // before the schemas that name them
  moe_metal::define(m, moe_metal::all_schemas());
}

// What records a call of each op, with the same arguments: see tape.h.
TORCH_LIBRARY(moe_metal_tape, m) {
  for (const std::string& schema : moe_metal::all_schemas()) m.def(moe_metal::recording_schema(schema).c_str());
}

// Every op's checks without its work. The fake functions of torch.compile and torch.export call them; those functions
// are in Python because the checks do not support symbolic sizes.
TORCH_LIBRARY(moe_metal_checks, m) { moe_metal::define(m, moe_metal::schemas()); }

#define MOE_METAL_CHECK(name) m.impl(#name, &moe_metal::Op<moe_metal::check_##name>::call<moe_metal::nothing>);
TORCH_LIBRARY_IMPL(moe_metal_checks, CompositeExplicitAutograd, m){// for Meta, and for calls without a tensor
                                                                   MOE_METAL_OPS(MOE_METAL_CHECK)}

TORCH_LIBRARY_IMPL(moe_metal, Autograd, m) {
  moe_metal::register_boxed<&moe_metal::no_autograd>(m);
}

TORCH_LIBRARY_IMPL(moe_metal, CompositeExplicitAutograd, m) { moe_metal::register_boxed<&moe_metal::no_backend>(m); }

TORCH_LIBRARY_IMPL(moe_metal, ADInplaceOrView, m) {
  moe_metal::register_boxed<&moe_metal::bump_versions>(m, &moe_metal::is_in_place);
}
