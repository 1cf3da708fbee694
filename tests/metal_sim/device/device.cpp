// The simulated `mps` device in PyTorch: allocation, views, copies, and a boxed fallback that runs every other aten op
// on the CPU, on the same bytes. It contains no Objective-C: a tensor's data pointer is an opaque id<MTLBuffer>.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_for_mps.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/where.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <limits>
#include <memory>
#include <unordered_map>

#include "sim.h"

namespace metal_sim {
namespace {

const c10::Device mps_device(c10::kMPS, 0);

// ---- memory ----

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* buffer = bytes ? new_tensor_buffer(bytes) : nullptr;
    return {buffer, buffer, &release_buffer, mps_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_buffer; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes) std::memcpy(find_memory(to)->bytes, find_memory(from)->bytes, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::kMPS, &allocator)

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kMPS; }
  c10::Device exchangeDevice(c10::Device) const override { return mps_device; }
  c10::Device getDevice() const override { return mps_device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, mps_device, 0); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(mps_device); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { check_guards(); }
  void synchronizeDevice(c10::DeviceIndex) const override { check_guards(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { check_guards(); }
};
C10_REGISTER_GUARD_IMPL(MPS, GuardImpl)

struct MPSHooks final : at::MPSHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasMPS() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    return options().macos >= std::pair(long(major), long(minor));
  }
  // The fallback draws its random numbers on the CPU, so the CPU's generator is the device's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getMPSDeviceAllocator() const override { return &allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return mps_device; }
  void deviceSynchronize() const override { check_guards(); }
  void commitStream() const override {}
  void* getCommandBuffer() const override { return command_buffer_object(); }
  void* getDispatchQueue() const override { return queue_object(); }
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes() + given_bytes(); }
};

// ---- CPU tensors over the same bytes ----

// The CPU aliases of mps tensors for one op call, and the conversion of CPU results back to mps tensors.
class Aliases {
 public:
  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_mps()) return tensor;
    auto cpu = over(storage_of(tensor), c10::DispatchKey::CPU, tensor);
    tensors_.emplace(cpu.unsafeGetTensorImpl(), tensor);
    kept_.push_back(cpu);
    return cpu;
  }

  // Converts a result: one in an aliased storage becomes a view of the original; any other is copied to the device.
  at::Tensor back(const at::Tensor& cpu) {
    if (!cpu.defined() || !cpu.is_cpu()) return cpu;
    if (auto known = tensors_.find(cpu.unsafeGetTensorImpl()); known != tensors_.end()) return known->second;
    auto original = originals_.find(cpu.storage().unsafeGetStorageImpl());
    if (original != originals_.end()) return over(original->second, c10::DispatchKey::MPS, cpu);
    auto storage = new_storage(cpu.storage().nbytes());
    copy_in(storage, cpu.storage());
    return over(storage, c10::DispatchKey::MPS, cpu);
  }

  // An op may have resized an output: does the same to the original.
  void write_back() {
    for (auto& [tensor, storage] : cpu_storages_) {
      auto& original = originals_.at(storage.unsafeGetStorageImpl());
      if (storage.data() != bytes_of(original)) grow(original, storage);
    }
    for (auto& cpu : kept_) {
      auto& original = tensors_.at(cpu.unsafeGetTensorImpl());
      if (original.sizes() == cpu.sizes() && original.strides() == cpu.strides() &&
          original.storage_offset() == cpu.storage_offset())
        continue;
      original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  bool empty() const { return kept_.empty(); }

 private:
  static void* bytes_of(const c10::Storage& storage) {
    return storage.data() ? find_memory(storage.data())->bytes : nullptr;
  }

  static c10::Storage new_storage(size_t bytes) {
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator.allocate(bytes), &allocator, true);
  }

  // Lazy zeros have no memory on the CPU.
  static void copy_in(const c10::Storage& storage, const c10::Storage& cpu) {
    if (cpu.data()) std::memcpy(bytes_of(storage), cpu.data(), cpu.nbytes());
  }

  static void grow(c10::Storage& original, const c10::Storage& cpu) {
    auto grown = new_storage(cpu.nbytes());
    copy_in(grown, cpu);
    original.set_data_ptr(std::move(grown.mutable_data_ptr()));
    original.set_nbytes(cpu.nbytes());
  }

  // A tensor over another storage with the dtype, shape, offset and lazy bits (zero, conjugate, negative) of `like`.
  static at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
    constexpr c10::DispatchKeySet lazy{c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate,
                                       c10::DispatchKey::Negative};
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(key) | (like.key_set() & lazy), like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return tensor;
  }

  // Tensors that share a storage get CPU tensors that share one, so that overlap checks and views are right.
  c10::Storage storage_of(const at::Tensor& tensor) {
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    if (auto known = cpu_storages_.find(impl); known != cpu_storages_.end()) return known->second;
    c10::Storage cpu(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                     c10::DataPtr(bytes_of(tensor.storage()), c10::kCPU), c10::GetCPUAllocator(), true);
    originals_.emplace(cpu.unsafeGetStorageImpl(), tensor.storage());
    return cpu_storages_.emplace(impl, cpu).first->second;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storages_;  // of the mps storage
  std::unordered_map<c10::StorageImpl*, c10::Storage> originals_;     // of the CPU storage
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;          // of the CPU tensor
  std::vector<at::Tensor> kept_;
};

// ---- the boxed fallback ----

template <typename Each>
c10::IValue map_tensors(const c10::IValue& value, Each each) {
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(each(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(each(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

c10::IValue to_cpu(const c10::IValue& value, Aliases& aliases) {
  if (value.isDevice()) return value.toDevice().is_mps() ? c10::Device(c10::kCPU) : value.toDevice();
  return map_tensors(value, [&](const at::Tensor& tensor) { return aliases.alias(tensor); });
}

// As on the real device, only a 0-dim CPU tensor may be mixed with mps tensors, and not in a list.
void check_devices(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    TORCH_CHECK(tensor.is_mps() || tensor.dim() == 0, schema.name(),
                ": Expected all tensors to be on the same device, but found at least two devices, mps:0 and ",
                tensor.device());
  }
}

// A return marked `Tensor(a!)` is the argument with that mark.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    at::ArrayRef<c10::IValue> arguments) {
  const auto* mark = result.alias_info();
  if (!mark || !mark->isWrite()) return nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->isWrite() && other->beforeSets() == mark->beforeSets()) return &arguments[i];
  }
  return nullptr;
}

// As a page fault would on the real device, if it is noticed at all.
void check_written_arguments(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* mark = schema.arguments()[i].alias_info();
    if (!mark || !mark->isWrite() || !arguments[i].isTensor()) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    if (tensor.defined() && tensor.is_mps()) check_written(tensor.storage().data(), schema.name().c_str());
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(schema.name().rfind("aten::", 0) == 0, schema.name(),
                              " has no kernel for the mps device, and only aten ops fall back to the CPU here");
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, count);
  check_devices(schema, arguments);
  check_written_arguments(schema, arguments);

  Aliases aliases;
  for (const c10::IValue& value : arguments) stack->push_back(to_cpu(value, aliases));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  aliases.write_back();
  const std::vector<c10::IValue> results = torch::jit::pop(*stack, schema.returns().size());
  for (size_t i = 0; i < results.size(); ++i) {
    const c10::IValue* written = written_argument(schema, schema.returns()[i], arguments);
    stack->push_back(written ? *written
                             : map_tensors(results[i], [&](const at::Tensor& t) { return aliases.back(t); }));
  }
}

// Ops whose result the host needs; on the real device they wait for the GPU.
bool waits_for_device(const std::string& name) {
  static const std::vector<std::string> names = {"aten::_local_scalar_dense", "aten::nonzero",       "aten::equal",
                                                 "aten::is_nonzero",          "aten::masked_select", "aten::_unique2"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  QueueScope queue(op.schema().name().c_str());
  ++counters().aten_ops;
  end_encoder();
  if (waits_for_device(op.schema().name())) count_host_sync(op.schema().name());
  run_on_cpu(op, stack);
}

// The op for attention on mps, implemented by the CPU op with the same arguments.
void attention_for_mps(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_dot_product_attention_math", "");
  fallback(op, keys, stack);
}

// ---- the device's own kernels ----

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::MPS),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::MPS),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  QueueScope queue("aten::copy_");
  ++counters().aten_ops;
  end_encoder();
  if (self.is_cpu()) count_host_sync("copy to the CPU");
  if (self.is_mps()) check_written(self.storage().data(), "aten::copy_");
  Aliases aliases;
  auto to = aliases.alias(self), from = aliases.alias(source);
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from, non_blocking);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const int64_t count = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

// ---- composite ops with a special implementation for mps that PyTorch's Linux build lacks ----

std::optional<at::Tensor> added_mask(const std::optional<at::Tensor>& mask, const at::Tensor& query) {
  if (!mask) return mask;
  TORCH_CHECK(mask->scalar_type() == at::kBool || mask->scalar_type() == query.scalar_type(),
              "Expected attn_mask dtype to be bool or that of query, which is ", query.scalar_type(), ", but got ",
              mask->scalar_type());
  if (mask->scalar_type() != at::kBool) return mask;
  const auto barred = at::scalar_tensor(-std::numeric_limits<double>::infinity(), query.options());
  return at::where(*mask, 0.0, barred);
}

// A single op on mps, unless gradients or dropout are needed. On macOS 14 that op only takes contiguous tensors.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  bool one_op = dropout == 0;
  for (const at::Tensor& tensor : {query, key, value}) {
    one_op &= !(at::GradMode::is_enabled() && tensor.requires_grad());
    one_op &= options().macos >= std::pair(15L, 0L) || tensor.is_contiguous();
  }
  const auto math = one_op ? &at::_scaled_dot_product_attention_math_for_mps : &at::_scaled_dot_product_attention_math;
  return std::get<0>(math(query, key, value, added_mask(mask, query), dropout, causal, {}, scale, grouped));
}

// ---- registrations ----

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("scaled_dot_product_attention", &attention);
  m.impl("_scaled_dot_product_attention_math_for_mps", torch::CppFunction::makeFromBoxedFunction<&attention_for_mps>());
  for (const char* op : {"convolution", "convolution_backward"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", &attention); }

}  // namespace

}  // namespace metal_sim

namespace at {
using metal_sim::MPSHooks;  // PyTorch looks the class up by this name
REGISTER_MPS_HOOKS(MPSHooks)
}  // namespace at
