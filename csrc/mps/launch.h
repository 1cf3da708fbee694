// Launching the kernels of shaders/*.metal on PyTorch's MPS stream. Only launch.mm, which encodes and commits,
// pipelines.mm, which compiles, and file_buffer.mm use Metal's runtime.
//
//   Kernels kernels("norm_add");                                // norm_add_float, norm_add_half and norm_add_bfloat
//   launch(kernels[dtype], grid, input, output, Params{...});  // arguments are bound in this order, from 0
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

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

struct Pipeline;  // a compiled kernel

// One kernel function. Its pipeline is compiled at its first launch and cached forever. So are its library (the shader
// file, or the part of it with this kernel, for one dtype of the activations and one format of weights) and compilation
// errors. All kernels are constructed when the extension is loaded, and form one list, which tools/compile_shaders.py
// compiles.
struct Kernel {
  Kernel(const char* shader, const char* function, int dtypes, const Format* format, int max_threads,
         const char* part = "")
      : shader(shader),
        function(function),
        dtypes(dtypes),
        format(format),
        max_threads(max_threads),
        part(part),
        previous(std::exchange(newest, this)) {}

  const char* const shader;    // shaders/<shader>.metal
  const char* const function;  // the part of its host_name before the dtypes
  const int dtypes;            // index into the dtype names in launch.mm; -1: the kernel has no dtype
  const Format* const format;
  const int max_threads;   // per threadgroup; with fewer threads each may use more registers
  const char* const part;  // of its file, see `in_part` in common.h; empty: a library contains the whole file
  std::atomic<const Pipeline*> pipeline = nullptr;
  std::atomic<bool> is_refused = false;  // it does not compile, or was wrong when it was checked (first_use.py)
  Kernel* const previous;                // all kernels form a list, newest first
  static inline Kernel* newest = nullptr;
};

// The kernels `<function>_<dtype>` of one function, or `<function>_<dtype>_<parameter dtype>` if called with two
// dtypes. A lookup only computes an index: nothing is built, compared or allocated per call.
class Kernels {
 public:
  Kernels(const char* shader, const char* function, int max_threads = 1024, const char* part = "",
          const Format& format = kFormats[0])
      : Kernels(shader, function, max_threads, part, format, std::make_index_sequence<kCount>()) {}
  explicit Kernels(const char* shader, int max_threads = 1024) : Kernels(shader, shader, max_threads) {}

  Kernel& operator[](at::ScalarType dtype) { return kernels_[index(dtype)]; }
  Kernel& operator()(at::ScalarType dtype, at::ScalarType parameter) {
    return kernels_[3 + 3 * index(dtype) + index(parameter)];
  }

 private:
  static constexpr int kCount = 12;  // 3 with one dtype, 9 with two
  template <size_t... i>
  Kernels(const char* shader, const char* function, int max_threads, const char* part, const Format& format,
          std::index_sequence<i...>)
      : kernels_{Kernel(shader, function, i, &format, max_threads, part)...} {}
  static int index(at::ScalarType dtype) {
    return dtype == at::kFloat ? MOE_METAL_float : dtype == at::kHalf ? MOE_METAL_half : MOE_METAL_bfloat;
  }
  Kernel kernels_[kCount];
};

// The same for each format of weights.
class FormatKernels {
 public:
  FormatKernels(const char* shader, const char* function, int max_threads = 1024, const char* part = "")
      : FormatKernels(shader, function, max_threads, part, std::make_index_sequence<kFormatCount>()) {}

  Kernel& operator()(at::ScalarType dtype, const Format* format) { return kernels_[format - kFormats][dtype]; }

 private:
  template <size_t... i>
  FormatKernels(const char* shader, const char* function, int max_threads, const char* part, std::index_sequence<i...>)
      : kernels_{Kernels(shader, function, max_threads, part, kFormats[i])...} {}
  Kernels kernels_[kFormatCount];
};

// The number of threadgroups of a dispatch, and the threads of each. Rows go along x, which no device limits.
struct Grid {
  int64_t x, y;
  int threads;
  bool empty() const { return x == 0 || y == 0; }
};

template <class Params>
inline constexpr bool kIsParams = false;
#define MOE_METAL_IS_PARAMS(params, bytes) \
  template <>                              \
  inline constexpr bool kIsParams<params> = true;
MOE_METAL_PARAMS(MOE_METAL_IS_PARAMS)

// A tensor or a params struct for [[buffer(n)]] of the kernel. It keeps a pointer, so the argument must outlive it.
struct Argument {
  Argument() = default;
  Argument(const Tensor& tensor) : tensor(&tensor) {}
  template <class Params>
    requires(std::is_trivially_copyable_v<Params> && std::is_class_v<Params>)
  Argument(const Params& params) : bytes(&params), size(sizeof(Params)) {
    static_assert(kIsParams<Params>, "MOE_METAL_PARAMS in shaders/common.h lists all params");
    static_assert(sizeof(Params) <= 4096, "Metal's setBytes takes 4 KB");
  }

  const Tensor* tensor = nullptr;  // if undefined (an absent optional), the first argument is bound instead
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

// Encodes the dispatches. Each sees the results of the ones before it; dispatches with an empty grid are skipped. All
// arguments must be ready: at:: ops cannot run during the encoding. Encoded work is committed from time to time. With
// tensors on the meta device, launch only compiles the kernels, which Python uses for background compilation
// (warmup.py).
void launch(std::initializer_list<Dispatch> dispatches);

template <class... Arguments>
void launch(Kernel& kernel, Grid grid, const Arguments&... arguments) {
  launch({Dispatch(kernel, grid, arguments...)});
}

namespace mps {
// Runs `all`, whose launches are collected and encoded together.
void together(c10::function_ref<void()> all);
}  // namespace mps

// Whether this macOS supports shaders/tensor_ops.metal, which uses matmul2d of Metal Performance Primitives.
bool has_tensor_ops();

// Whether this kernel compiles, which is tried once, and is not refused. For kernels with a fallback: errors are
// ignored.
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
