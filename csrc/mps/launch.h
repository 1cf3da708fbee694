// Launching the kernels of shaders/*.metal on PyTorch's MPS stream. launch.mm is the only file that knows Metal.
//
//   Kernels kernels("norm_add");                                // norm_add_float, norm_add_half and norm_add_bfloat
//   launch(kernels[dtype], grid, input, output, Params{...});  // arguments are bound in this order, from 0
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

#include "common.h"
#include "formats.h"

namespace moe_metal {

using at::Tensor;

struct Pipeline;  // what Metal made of a kernel

// One kernel function. Its pipeline is compiled at its first launch, and kept for good; so is its library, which is the
// shader file, or the part of it that holds the kernel, for one dtype of the activations and one format of weights, and
// so is an error of either. All kernels are made as the library is loaded, and are one list: tools/compile_shaders.py
// compiles what is in it.
struct Kernel {
  Kernel(const char* shader, const char* function, int dtypes, const Format* format, int max_threads, int part = 0)
      : shader(shader),
        function(function),
        dtypes(dtypes),
        format(format),
        max_threads(max_threads),
        part(part),
        next(std::exchange(first, this)) {}

  const char* const shader;    // shaders/<shader>.metal
  const char* const function;  // the part of its host_name before the dtypes
  const int dtypes;            // index into the names of dtypes in launch.mm; -1: the kernel has no dtype
  const Format* const format;
  const int max_threads;  // per threadgroup; fewer leave each thread more registers
  const int part;         // of its file, as `in_part` there says
  std::atomic<const Pipeline*> pipeline = nullptr;
  std::atomic<bool> is_refused = false;  // by Metal, as `compiles` has found
  Kernel* const next;                    // the one that was made before
  static inline Kernel* first = nullptr;
};

// The kernels `<function>_<dtype>` of one function, or `<function>_<dtype>_<parameter dtype>` with `two_dtypes`.
// A lookup is an index: nothing is built, compared or allocated per call.
class Kernels {
 public:
  Kernels(const char* shader, const char* function, int max_threads = 1024, int part = 0,
          const Format& format = kFormats[0])
      : Kernels(shader, function, max_threads, part, format, std::make_index_sequence<kCount>()) {}
  explicit Kernels(const char* shader, int max_threads = 1024) : Kernels(shader, shader, max_threads) {}

  Kernel& operator[](at::ScalarType dtype) { return kernels_[index(dtype)]; }
  Kernel& operator()(at::ScalarType dtype, at::ScalarType parameter) {
    return kernels_[3 + 3 * index(dtype) + index(parameter)];
  }

 private:
  static constexpr int kCount = 12;  // 3 of one dtype, 9 of two
  template <size_t... i>
  Kernels(const char* shader, const char* function, int max_threads, int part, const Format& format,
          std::index_sequence<i...>)
      : kernels_{Kernel(shader, function, i, &format, max_threads, part)...} {}
  static int index(at::ScalarType dtype) { return dtype == at::kFloat ? 0 : dtype == at::kHalf ? 1 : 2; }
  Kernel kernels_[kCount];
};

// The same for each format of weights.
class FormatKernels {
 public:
  FormatKernels(const char* shader, const char* function, int max_threads = 1024, int part = 0)
      : FormatKernels(shader, function, max_threads, part, std::make_index_sequence<kFormatCount>()) {}

  Kernel& operator()(at::ScalarType dtype, const Format* format) { return kernels_[format - kFormats][dtype]; }

 private:
  template <size_t... i>
  FormatKernels(const char* shader, const char* function, int max_threads, int part, std::index_sequence<i...>)
      : kernels_{Kernels(shader, function, max_threads, part, kFormats[i])...} {}
  Kernels kernels_[kFormatCount];
};

// The threadgroups of a dispatch, and the threads of each. Rows go along x, where no device limits their number.
struct Grid {
  int64_t x, y;
  int threads;
  bool empty() const { return x == 0 || y == 0; }
};

// A tensor or a params struct, in the order of the kernel's [[buffer(n)]]. It points to what it was made from.
struct Argument {
  Argument() = default;
  Argument(const Tensor& tensor) : tensor(&tensor) {}
  template <class Params>
    requires(std::is_trivially_copyable_v<Params> && std::is_class_v<Params>)
  Argument(const Params& params) : bytes(&params), size(sizeof(Params)) {
    static_assert(sizeof(Params) <= 4096, "Metal's setBytes takes 4 KB");
  }

  const Tensor* tensor = nullptr;  // undefined for an absent optional tensor: the first argument is bound in its place
  const void* bytes = nullptr;
  size_t size = 0;
};

struct Dispatch {
  template <class... Arguments>
  Dispatch(Kernel& kernel, Grid grid, const Arguments&... arguments)
      : kernel(kernel), grid(grid), arguments{Argument(arguments)...}, count(sizeof...(Arguments)) {}

  Kernel& kernel;
  Grid grid;
  std::array<Argument, 24> arguments;
  int count;
};

// Encodes the dispatches, each of which sees the results of those before it. Those with an empty grid are left out.
// Nothing may be allocated or computed by at:: ops meanwhile, so all arguments are ready before the call. The GPU is
// given what has come together from time to time. Of tensors on the meta device the kernels are compiled, and nothing
// is encoded: a rehearsal, by which Python compiles in advance (rehearsal.py).
void launch(std::initializer_list<Dispatch> dispatches);

template <class... Arguments>
void launch(Kernel& kernel, Grid grid, const Arguments&... arguments) {
  launch({Dispatch(kernel, grid, arguments...)});
}

// Whether this macOS has matmul2d of Metal Performance Primitives as shaders/tensor_ops.metal uses it.
bool has_tensor_ops();

// Whether Metal makes a pipeline of this kernel, which is compiled if it is new. For kernels that others can replace:
// the error is dropped.
bool compiles(Kernel& kernel);

// ---------------------------------------------------------------------------------------------- params and grids

inline uint32_t to_uint(int64_t value) {
  TORCH_CHECK(0 <= value && value <= std::numeric_limits<int32_t>::max(), "moe_metal: expected a size below 2^31, got ",
              value);
  return static_cast<uint32_t>(value);
}

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline ParameterType parameter_type(const Tensor& tensor) {
  if (!tensor.defined()) return ParameterType::absent;
  return tensor.scalar_type() == at::kFloat ? ParameterType::float32 : ParameterType::activation;
}

}  // namespace moe_metal
