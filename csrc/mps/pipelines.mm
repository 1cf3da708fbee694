// Compiles the kernels of shaders/*.metal, and lists them for tools. Objects created here are never released, on
// purpose, so that no destructors run at process exit.
#include "mps/pipelines.h"

#include <sys/sysctl.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "shader_texts.h"

// One build runs on all supported macOS versions, so availability is checked at run time.
#pragma clang diagnostic ignored "-Wunguarded-availability-new"
#pragma clang diagnostic ignored "-Wdeprecated-declarations"

namespace moe_metal {

// Derives the macOS version from the kernel's. On macOS 26 NSProcessInfo returns 16 to programs that were linked for an
// older version, as many Pythons are. torch_moe_metal/macos.py does the same in Python.
bool is_macos_at_least(int major, int minor) {
  char release[32] = {};
  size_t size = sizeof(release) - 1;
  if (sysctlbyname("kern.osrelease", release, &size, nullptr, 0) != 0) return false;
  int darwin = 0, own_minor = 0;
  std::sscanf(release, "%d.%d", &darwin, &own_minor);
  return std::pair(darwin < 25 ? darwin - 9 : darwin == 25 ? 26 : darwin, own_minor) >= std::pair(major, minor);
}

namespace {

constexpr NSUInteger kThreadgroupMemory = 32768;

NSString* text(const std::string& characters) { return [NSString stringWithUTF8String:characters.c_str()]; }

// ---------------------------------------------------------------------------------------------- compiling

// Devices without an Apple family, such as a virtual Mac's, guarantee neither simdgroup matrices nor bfloat16.
bool is_apple_gpu(id<MTLDevice> device) { return [device supportsFamily:MTLGPUFamilyApple7]; }

void check_device(id<MTLDevice> device) {
  TORCH_CHECK(is_macos_at_least(14),
              "moe_metal: expected macOS 14 or newer, whose Metal supports bfloat16; this one is older");
  TORCH_CHECK(is_apple_gpu(device),
              "moe_metal: expected an Apple GPU of family 7 or newer, as every Apple silicon Mac ", "has; ",
              [[device name] UTF8String], " is not one: a virtual Mac's GPU lacks features that the kernels need");
  TORCH_CHECK([device maxThreadgroupMemoryLength] >= kThreadgroupMemory, "moe_metal: expected a GPU with ",
              kThreadgroupMemory, " bytes of threadgroup memory; ", [[device name] UTF8String], " has ",
              [device maxThreadgroupMemoryLength]);
}

// Language versions are numbers because the SDK may be older than the running macOS and lack their names.
MTLLanguageVersion language_version() {
  const int major = is_macos_at_least(26) ? 4 : 3, minor = is_macos_at_least(26) ? 0 : is_macos_at_least(15) ? 2 : 1;
  return static_cast<MTLLanguageVersion>((major << 16) + minor);
}

// The index of the dtype of a kernel's activations, numbered as in common.h; -1: it has none.
int activation_dtype(const Kernel& kernel) { return kernel.dtypes < 3 ? kernel.dtypes : (kernel.dtypes - 3) / 3; }

// The macros that select one part, one dtype and one format of a shader file.
using Macros = std::vector<std::pair<std::string, std::string>>;

Macros library_macros(const Kernel& kernel) {
  const int dtype = activation_dtype(kernel);
  const std::string part = kernel.part;
  Macros macros;
  if (!part.empty()) macros = {{"MOE_METAL_PART", part}, {"MOE_METAL_PART_" + part, "1"}};
  if (dtype >= 0) macros.emplace_back("MOE_METAL_DTYPE", std::to_string(dtype));
  if (!kernel.format->is_dense()) macros.emplace_back("MOE_METAL_FORMAT", std::string(kernel.format->library));
  return macros;
}

NSDictionary* dictionary(const Macros& macros) {
  std::vector<NSString*> names, values;
  for (const auto& [name, value] : macros) names.push_back(text(name)), values.push_back(text(value));
  return [NSDictionary dictionaryWithObjects:values.data() forKeys:names.data() count:names.size()];
}

// Safe maths, because these ops define their results for infinities and NaN.
MTLCompileOptions* compile_options(const Kernel& kernel) {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  [options setLanguageVersion:language_version()];
  [options setPreprocessorMacros:dictionary(library_macros(kernel))];
#if !defined(__MAC_OS_X_VERSION_MAX_ALLOWED) || __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  if (is_macos_at_least(15)) {
    [options setMathMode:MTLMathModeSafe];
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    return options;
  }
#endif
  [options setFastMathEnabled:NO];
  return options;
}

const char* shader_text(const std::string& shader) {
  for (const ShaderText& known : shader_texts) {
    if (shader == known.name) return known.text;
  }
  TORCH_CHECK(false, "moe_metal: this build does not contain shaders/", shader, ".metal; rebuild it");
}

// The compile time of each library, in the order in which they were finished.
struct CompileTimes {
  std::mutex mutex;
  c10::List<std::string> libraries;
  c10::List<double> seconds;
};

CompileTimes& compile_times() {
  static auto& times = *new CompileTimes;
  return times;
}

std::string library_name(const Kernel& kernel) {
  std::string name = kernel.shader;
  for (const auto& [macro, value] : library_macros(kernel)) name.append(" ").append(macro).append("=").append(value);
  return name;
}

id<MTLLibrary> compile_library(id<MTLDevice> device, const Kernel& kernel, const std::string& more = "") {
  const std::string shader = kernel.shader;
  const auto start = std::chrono::steady_clock::now();
  NSError* error = nil;
  // By default Metal compiles only few libraries in parallel. This also affects PyTorch's own shaders.
  [device setShouldMaximizeConcurrentCompilation:YES];
  id<MTLLibrary> library = [device newLibraryWithSource:text(shader_text(shader) + more)
                                                options:compile_options(kernel)
                                                  error:&error];
  TORCH_CHECK(library, "moe_metal: shaders/", shader, ".metal does not compile on ", [[device name] UTF8String], ":\n",
              reason(error));
  [library setLabel:text("moe_metal " + shader)];
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::lock_guard lock(compile_times().mutex);
  compile_times().libraries.push_back(library_name(kernel));
  compile_times().seconds.push_back(took.count());
  return library;
}

std::string dtypes_of(const Kernel& kernel) {
  static constexpr const char* kDtypes[] = {"float",       "half",         "bfloat",      "float_float",
                                            "float_half",  "float_bfloat", "half_float",  "half_half",
                                            "half_bfloat", "bfloat_float", "bfloat_half", "bfloat_bfloat"};
  return kernel.dtypes < 0 ? "" : kDtypes[kernel.dtypes];
}

std::string host_name(const Kernel& kernel) {
  std::string name = kernel.function;
  if (!kernel.format->is_dense()) name.append("_").append(kernel.format->library);
  return kernel.dtypes < 0 ? name : name + "_" + dtypes_of(kernel);
}

id<MTLComputePipelineState> compile_pipeline(id<MTLDevice> device, id<MTLLibrary> library, const Kernel& kernel,
                                             const std::string& name) {
  id<MTLFunction> function = [[library newFunctionWithName:text(name)] autorelease];
  TORCH_CHECK(function, "moe_metal: shaders/", kernel.shader, ".metal has no kernel ", name);
  MTLComputePipelineDescriptor* descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
  [descriptor setLabel:text(name)];
  [descriptor setComputeFunction:function];
  [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
  [descriptor setMaxTotalThreadsPerThreadgroup:kernel.max_threads];
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithDescriptor:descriptor
                                                                            options:MTLPipelineOptionNone
                                                                         reflection:nullptr
                                                                              error:&error];
  const char* gpu = [[device name] UTF8String];
  TORCH_CHECK(state, "moe_metal: kernel ", name, " does not compile on ", gpu, ":\n", reason(error));
  TORCH_CHECK([state threadExecutionWidth] == kSimdgroup, "moe_metal: expected a GPU with simdgroups of ", kSimdgroup,
              " threads; ", gpu, " has ", [state threadExecutionWidth]);
  TORCH_CHECK([state maxTotalThreadsPerThreadgroup] >= static_cast<NSUInteger>(kernel.max_threads),
              "moe_metal: kernel ", name, ": expected threadgroups of ", kernel.max_threads, " threads; ", gpu,
              " allows ", [state maxTotalThreadsPerThreadgroup]);
  return state;
}

// A cache of values that are made once per key, by the first thread that needs one. Threads that need the same key wait
// for it; other keys are made in parallel. Errors are cached and rethrown.
template <class Key, class Value>
class MadeOnce {
 public:
  template <class Make>
  Value get(const Key& key, const Make& make) {
    std::unique_lock lock(mutex_);
    const auto [found, is_first] = made_.try_emplace(key);
    Made& made = found->second;  // stays valid: elements of a map do not move
    if (is_first) {
      lock.unlock();
      Made result = {.is_ready = true};
      @autoreleasepool {
        try {
          result.value = make();
        } catch (...) {  // inside the pool, because an exception would leak it
          result.error = std::current_exception();
        }
      }
      lock.lock();
      made = result;
      ready_.notify_all();
    }
    ready_.wait(lock, [&made] { return made.is_ready; });
    if (made.error) std::rethrow_exception(made.error);
    return made.value;
  }

 private:
  struct Made {
    bool is_ready = false;
    Value value = {};
    std::exception_ptr error = nullptr;
  };
  std::mutex mutex_;
  std::condition_variable ready_;
  std::map<Key, Made> made_;
};

id<MTLLibrary> library_of(id<MTLDevice> device, const Kernel& kernel) {
  using Library = std::tuple<std::string, std::string, int, const Format*>;
  static auto& libraries = *new MadeOnce<Library, id<MTLLibrary>>;
  const Library key = {kernel.shader, kernel.part, activation_dtype(kernel), kernel.format};
  return libraries.get(key, [&] { return compile_library(device, kernel); });
}

// The slow path, once per kernel. It does not run on the stream's queue, and does not need the GIL, which PyTorch
// releases before it calls an op.
const Pipeline* compile(id<MTLDevice> device, Kernel& kernel) {
  static auto& pipelines = *new MadeOnce<const Kernel*, const Pipeline*>;
  return pipelines.get(&kernel, [&] {
    check_device(device);
    id<MTLLibrary> library = library_of(device, kernel);
    const std::string name = host_name(kernel);
    const auto* pipeline = new Pipeline{compile_pipeline(device, library, kernel, name), [text(name) retain]};
    kernel.pipeline.store(pipeline, std::memory_order_release);
    return pipeline;
  });
}

// ---------------------------------------------------------------------------------------------- for Python's tools

// A line per kernel: maximum threads of a threadgroup, host name, shader, and the macros of its library.
c10::List<std::string> all_kernels() {
  c10::List<std::string> lines;
  for (const Kernel* kernel = Kernel::newest; kernel; kernel = kernel->previous) {
    lines.push_back(std::to_string(kernel->max_threads) + " " + host_name(*kernel) + " " + library_name(*kernel));
  }
  return lines;
}

// The functions of the shaders, with the most threads of a threadgroup, and for each whether this process has a
// pipeline of it, in any dtype and format. Without warm-up that is one that has run.
std::tuple<c10::List<std::string>, c10::List<bool>> all_functions() {
  std::map<std::string, bool> has_pipeline;
  for (const Kernel* kernel = Kernel::newest; kernel; kernel = kernel->previous) {
    const std::string name = std::string(kernel->function) + " (" + std::to_string(kernel->max_threads) + " threads)";
    has_pipeline[name] |= kernel->pipeline.load(std::memory_order_acquire) != nullptr;
  }
  c10::List<std::string> names;
  c10::List<bool> found;
  for (const auto& [name, has] : has_pipeline) {
    names.push_back(name);
    found.push_back(has);
  }
  return {names, found};
}

// The first device, as in PyTorch. A device may exist even if PyTorch says that MPS is not available.
// MTLCreateSystemDefaultDevice returns nil in a process without CoreGraphics.
id<MTLDevice> default_device() {
  static NSArray* devices = MTLCopyAllDevices();
  TORCH_CHECK([devices count] > 0, "moe_metal: macOS finds no Metal device");
  return [devices objectAtIndex:0];
}

void check_default_device() {
  @autoreleasepool {
    check_device(default_device());
  }
}

// Compiles the library of the kernel at an index of that list, and its pipeline if this Mac's GPU can run it.
// -> whether it can. If `more` is not empty, only the library is compiled, again, with this text appended.
bool compile_at(int64_t index, const std::string& more) {
  id<MTLDevice> device = default_device();
  Kernel* kernel = Kernel::newest;
  for (; index > 0 && kernel; --index) kernel = kernel->previous;
  TORCH_CHECK_INDEX(index == 0 && kernel, "moe_metal: expected a place in the list of kernels");
  if (!more.empty()) {
    @autoreleasepool {
      [compile_library(device, *kernel, more) release];
      return false;
    }
  }
  library_of(device, *kernel);
  if (is_apple_gpu(device)) compile(device, *kernel);
  return is_apple_gpu(device);
}

std::tuple<c10::List<std::string>, c10::List<double>> times_of_libraries() {
  std::lock_guard lock(compile_times().mutex);
  return {compile_times().libraries.copy(), compile_times().seconds.copy()};
}

// ---------------------------------------------------------------------------------------------- for the first use

// The kernels that this thread's warm-up calls need, while it lists them instead of compiling them.
thread_local bool lists_kernels = false;
thread_local std::vector<const Kernel*> listed;

// Function, format, dtypes, and the most threads of a threadgroup: one line for each kernel.
std::string described(const Kernel& kernel) {
  const std::string format = kernel.format->is_dense() ? "dense" : std::string(kernel.format->library);
  const std::string dtypes = kernel.dtypes < 0 ? "none" : dtypes_of(kernel);
  return std::string(kernel.function) + " " + format + " " + dtypes + " " + std::to_string(kernel.max_threads);
}

// The lines of the kernels listed so far, which are then forgotten. `on`: whether this thread lists from now on.
c10::List<std::string> list_kernels(bool on) {
  lists_kernels = on;
  c10::List<std::string> lines;
  for (const Kernel* kernel : listed) lines.push_back(described(*kernel));
  listed.clear();
  return lines;
}

// From now on the kernel with this line raises instead of being launched, or is used again.
void refuse(const std::string& line, bool is_refused) {
  for (Kernel* kernel = Kernel::newest; kernel; kernel = kernel->previous) {
    if (described(*kernel) == line) kernel->is_refused = is_refused;
  }
}

bool has_matrix_units() {
  constexpr auto kApple10 = static_cast<MTLGPUFamily>(1010);  // M5
  return has_tensor_ops() && [at::mps::getCurrentMPSStream()->device() supportsFamily:kApple10];
}

}  // namespace

void prepare(at::mps::MPSStream* stream, Kernel& kernel) {
  if (lists_kernels) {
    listed.push_back(&kernel);
  } else {
    pipeline_of(stream, kernel);
  }
}

const Pipeline* pipeline_of(at::mps::MPSStream* stream, Kernel& kernel) {
  const Pipeline* ready = kernel.pipeline.load(std::memory_order_acquire);
  const Pipeline* pipeline = ready ? ready : compile([stream->commandQueue() device], kernel);
  TORCH_CHECK(!kernel.is_refused, "moe_metal: kernel ", host_name(kernel),
              " gave wrong results on this GPU when it was checked, so it is not used. `python -m torch_moe_metal ",
              "doctor` tests all kernels");
  return pipeline;
}

// Before macOS 26.2, tensors in registers have a different layout, and bfloat tensors are missing. In 26.2,
// PyTorch found products wrong (pytorch#197114).
bool has_tensor_ops() { return is_macos_at_least(26, 3); }

bool compiles(Kernel& kernel) {
  if (kernel.is_refused) return false;
  try {
    pipeline_of(at::mps::getCurrentMPSStream(), kernel);
  } catch (const c10::Error&) {
    kernel.is_refused = true;
  }
  return !kernel.is_refused;
}

}  // namespace moe_metal

// Only for first_use.py, doctor and tools/compile_shaders.py.
TORCH_LIBRARY_FRAGMENT(moe_metal, m) {
  m.def("_list_kernels(bool on) -> str[]", &moe_metal::list_kernels);
  m.def("_refuse(str kernel, bool is_refused) -> ()", &moe_metal::refuse);
  m.def("_has_matrix_units() -> bool", &moe_metal::has_matrix_units);
  m.def("_kernels() -> str[]", &moe_metal::all_kernels);
  m.def("_functions() -> (str[], bool[])", &moe_metal::all_functions);
  m.def("_check_device() -> ()", &moe_metal::check_default_device);
  m.def("_compile(int index, str more) -> bool", &moe_metal::compile_at);
  m.def("_compile_times() -> (str[], float[])", &moe_metal::times_of_libraries);
}
