// The ops of packed weights on ARM, as a process that answers calls: emulated.py sends them, and says how.
//
// Each argument's memory ends where a page begins that cannot be read, so that a read beyond it ends the process.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "ops.h"

TORCH_LIBRARY_IMPL(moe_metal, CPU, m) {
  m.impl("dequantize", &moe_metal::Op<moe_metal::check_dequantize>::call<moe_metal::cpu::run_dequantize>);
  m.impl("experts", &moe_metal::Op<moe_metal::check_experts>::call<moe_metal::cpu::run_experts>);
  m.impl("linear", &moe_metal::Op<moe_metal::check_linear>::call<moe_metal::cpu::run_linear>);
}

namespace {

enum Kind : uint8_t { kNone, kTensor, kInt, kFloat, kBool, kString };

void read_all(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);  // the caller has closed the pipe
}
void write_all(const void* from, size_t bytes) {
  if (std::fwrite(from, 1, bytes, stdout) != bytes) std::exit(1);
}
template <class Value>
Value read() {
  Value value;
  read_all(&value, sizeof(value));
  return value;
}
template <class Value>
void write(Value value) {
  write_all(&value, sizeof(value));
}

std::string read_string() {
  std::string text(read<int64_t>(), ' ');
  read_all(text.data(), text.size());
  return text;
}

std::vector<int64_t> read_ints(int64_t count) {
  std::vector<int64_t> values(count);
  read_all(values.data(), count * sizeof(int64_t));
  return values;
}

// Bytes whose end is a page's, before one that cannot be touched.
struct Walled {
  size_t mapped;
  char *begin, *data;
  explicit Walled(size_t bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page * page;
    mapped = pages + page;
    begin = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (begin == MAP_FAILED) std::abort();
    mprotect(begin + pages, page, PROT_NONE);
    data = begin + pages - bytes;
  }
};

at::Tensor read_tensor() {
  const auto dtype = static_cast<at::ScalarType>(read<int64_t>());
  const auto dims = read<int64_t>();
  const auto sizes = read_ints(dims), strides = read_ints(dims);
  const auto bytes = read<int64_t>();
  const Walled memory(bytes);
  read_all(memory.data, bytes);
  const auto unmap = [memory](void*) { munmap(memory.begin, memory.mapped); };
  return at::from_blob(memory.data, sizes, strides, unmap, at::TensorOptions(dtype));
}

c10::IValue read_value() {
  switch (read<uint8_t>()) {
    case kTensor:
      return read_tensor();
    case kInt:
      return read<int64_t>();
    case kFloat:
      return read<double>();
    case kBool:
      return read<uint8_t>() != 0;
    case kString:
      return read_string();
    default:
      return {};
  }
}

void write_tensor(const at::Tensor& given) {
  const at::Tensor tensor = given.contiguous();
  write(static_cast<int64_t>(tensor.scalar_type()));
  write(tensor.dim());
  write_all(tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
  write_all(tensor.const_data_ptr(), tensor.nbytes());
}

// These ops have one output each and write no argument.
void answer() {
  const auto name = read_string();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("moe_metal::" + name).c_str(), "");
  std::vector<c10::IValue> stack(read<int64_t>());
  for (auto& value : stack) value = read_value();
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    write(int64_t{0});
    write(static_cast<int64_t>(message.size()));
    write_all(message.data(), message.size());
    return;
  }
  write(int64_t{1});
  write_tensor(stack[0].toTensor());
}

}  // namespace

int main() {
  while (true) {
    answer();
    std::fflush(stdout);
  }
}
