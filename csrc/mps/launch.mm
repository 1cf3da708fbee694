// See launch.h. Objects created here are kept for good, on purpose: nothing of ours runs while the process exits.
#include "mps/launch.h"

#include <ATen/mps/MPSStream.h>

#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "mps/tuning.h"
#include "shader_texts.h"

// The versions below are asked for at run time, since one build runs on all of them.
#pragma clang diagnostic ignored "-Wunguarded-availability-new"
#pragma clang diagnostic ignored "-Wdeprecated-declarations"

namespace moe_metal {

struct Pipeline {
  id<MTLComputePipelineState> state;
  NSString* name;
};

namespace {

constexpr NSUInteger kThreadgroupMemory = 32768;

bool is_macos_at_least(NSInteger major) {
  return [[NSProcessInfo processInfo] isOperatingSystemAtLeastVersion:NSOperatingSystemVersion{major, 0, 0}];
}

NSString* text(const std::string& characters) { return [NSString stringWithUTF8String:characters.c_str()]; }

std::string reason(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no reason given"; }

// ---------------------------------------------------------------------------------------------- compiling

void check_device(id<MTLDevice> device) {
  TORCH_CHECK(is_macos_at_least(14),
              "moe_metal: expected macOS 14 or newer, whose Metal knows bfloat16; this one is older");
  TORCH_CHECK([device maxThreadgroupMemoryLength] >= kThreadgroupMemory, "moe_metal: expected a GPU with ",
              kThreadgroupMemory, " bytes of threadgroup memory; ", [[device name] UTF8String], " has ",
              [device maxThreadgroupMemoryLength]);
}

// Language versions are written as numbers: an older SDK than the running macOS has no name for them.
MTLLanguageVersion language_version() {
  const int major = is_macos_at_least(26) ? 4 : 3, minor = is_macos_at_least(26) ? 0 : is_macos_at_least(15) ? 2 : 1;
  return static_cast<MTLLanguageVersion>((major << 16) + minor);
}

// The dtype of a kernel's activations, as common.h numbers them; -1: it has none.
int activation_dtype(const Kernel& kernel) { return kernel.dtypes < 3 ? kernel.dtypes : (kernel.dtypes - 3) / 3; }

// What makes a shader file the library of one part, one dtype and one format.
NSDictionary* library_macros(const Kernel& kernel) {
  const int dtype = activation_dtype(kernel);
  NSString* names[3] = {@"MOE_METAL_PART"};
  id values[3] = {[NSNumber numberWithInt:kernel.part]};
  int count = 1;
  if (dtype >= 0) names[count] = @"MOE_METAL_DTYPE", values[count++] = [NSNumber numberWithInt:dtype];  // else of all
  if (!kernel.format->is_dense()) {
    names[count] = @"MOE_METAL_FORMAT", values[count++] = text(std::string(kernel.format->library));
  }
  return [NSDictionary dictionaryWithObjects:values forKeys:names count:count];
}

// Safe maths: infinities and NaN are values that these ops define.
MTLCompileOptions* compile_options(const Kernel& kernel) {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  [options setLanguageVersion:language_version()];
  [options setPreprocessorMacros:library_macros(kernel)];
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
  for (const ShaderText& each : shader_texts) {
    if (shader == each.name) return each.text;
  }
  TORCH_CHECK(false, "moe_metal: this build holds no shaders/", shader, ".metal; rebuild it");
}

id<MTLLibrary> compile_library(id<MTLDevice> device, const Kernel& kernel) {
  check_device(device);
  const std::string shader = kernel.shader;
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:text(shader_text(shader))
                                                options:compile_options(kernel)
                                                  error:&error];
  TORCH_CHECK(library, "moe_metal: shaders/", shader, ".metal does not compile on ", [[device name] UTF8String], ":\n",
              reason(error));
  [library setLabel:text("moe_metal " + shader)];
  return library;
}

std::string host_name(const Kernel& kernel) {
  static constexpr const char* kDtypes[] = {"float",       "half",         "bfloat",      "float_float",
                                            "float_half",  "float_bfloat", "half_float",  "half_half",
                                            "half_bfloat", "bfloat_float", "bfloat_half", "bfloat_bfloat"};
  std::string name = kernel.function;
  if (!kernel.format->is_dense()) name.append("_").append(kernel.format->library);
  return kernel.dtypes < 0 ? name : name + "_" + kDtypes[kernel.dtypes];
}

id<MTLComputePipelineState> compile_pipeline(id<MTLDevice> device, id<MTLLibrary> library, const Kernel& kernel,
                                             const std::string& name) {
  id<MTLFunction> function = [[library newFunctionWithName:text(name)] autorelease];
  TORCH_CHECK(function, "moe_metal: shaders/", kernel.shader, ".metal holds no kernel ", name);
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

// What is made once for each key, by the first thread that asks for it. Others that want the same wait for that one,
// and nobody for other keys: Metal compiles side by side. An error is kept, and told to everybody who asks.
template <class Key, class Value>
class MadeOnce {
 public:
  template <class Make>
  Value get(const Key& key, const Make& make) {
    std::unique_lock lock(mutex_);
    const auto [found, is_first] = made_.try_emplace(key);
    Made& made = found->second;  // a map's elements stay where they are
    if (is_first) {
      lock.unlock();
      Made result = {.is_ready = true};
      @autoreleasepool {
        try {
          result.value = make();
        } catch (...) {  // inside of the pool, which an exception would leave behind
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

// Slow path, once per kernel. It runs off the stream's queue and needs nothing of Python: PyTorch gives the GIL back
// before it calls an op.
const Pipeline* compile(id<MTLDevice> device, Kernel& kernel) {
  using Library = std::tuple<std::string, int, int, const Format*>;
  static auto& libraries = *new MadeOnce<Library, id<MTLLibrary>>;
  static auto& pipelines = *new MadeOnce<const Kernel*, const Pipeline*>;
  return pipelines.get(&kernel, [&] {
    const Library key = {kernel.shader, kernel.part, activation_dtype(kernel), kernel.format};
    id<MTLLibrary> library = libraries.get(key, [&] { return compile_library(device, kernel); });
    const std::string name = host_name(kernel);
    const auto* pipeline = new Pipeline{compile_pipeline(device, library, kernel, name), [text(name) retain]};
    kernel.pipeline.store(pipeline, std::memory_order_release);
    return pipeline;
  });
}

const Pipeline* pipeline_of(at::mps::MPSStream* stream, Kernel& kernel) {
  const Pipeline* ready = kernel.pipeline.load(std::memory_order_acquire);
  return ready ? ready : compile([stream->commandQueue() device], kernel);
}

// ---------------------------------------------------------------------------------------------- encoding

void check_tensors(const Dispatch& dispatch) {
  for (int i = 0; i < dispatch.count; ++i) {
    const Tensor* tensor = dispatch.arguments[i].tensor;
    if (!tensor || !tensor->defined()) continue;
    TORCH_CHECK(tensor->device().type() == at::kMPS && tensor->has_storage() && tensor->storage().data(),
                "moe_metal: ", dispatch.kernel.function, ": expected tensors in Metal buffers, got one on ",
                tensor->device());
  }
}

// PyTorch keeps the id<MTLBuffer> of an MPS tensor where other devices keep an address.
void bind(id<MTLComputeCommandEncoder> encoder, const Tensor& tensor, int index) {
  [encoder setBuffer:(id<MTLBuffer>)tensor.storage().data()
              offset:tensor.storage_offset() * tensor.element_size()
             atIndex:index];
}

void encode(id<MTLComputeCommandEncoder> encoder, const Pipeline* pipeline, const Dispatch& dispatch) {
  [encoder pushDebugGroup:pipeline->name];
  [encoder setComputePipelineState:pipeline->state];
  for (int i = 0; i < dispatch.count; ++i) {
    const Argument& argument = dispatch.arguments[i];
    if (argument.bytes) {
      [encoder setBytes:argument.bytes length:argument.size atIndex:i];
    } else {
      bind(encoder, argument.tensor->defined() ? *argument.tensor : *dispatch.arguments[0].tensor, i);
    }
  }
  [encoder dispatchThreadgroups:MTLSizeMake(dispatch.grid.x, dispatch.grid.y, 1)
          threadsPerThreadgroup:MTLSizeMake(dispatch.grid.threads, 1, 1)];
  [encoder popDebugGroup];
}

// ---------------------------------------------------------------------------------------------- commits

// PyTorch leaves what is encoded where it is until somebody waits for a result. The GPU would idle meanwhile, and macOS
// kills a command buffer that keeps the GPU for seconds (kIOGPUCommandBufferCallbackErrorImpactingInteractivity), whose
// results are then missing without a word. So work is handed over in time; nobody waits for it.
//
// tuning.h says how much work.
struct Work {
  int64_t dispatches = 0, threads = 0;
};

// Of a stream, since it was last committed here. What it refers to is used on that stream's own queue alone.
Work& work_since_commit(const at::mps::MPSStream* stream) {
  static auto& mutex = *new std::mutex;
  static auto& of_streams = *new std::map<const at::mps::MPSStream*, Work>;
  std::lock_guard lock(mutex);
  return of_streams[stream];
}

// On the stream's queue. It ends the stream's encoder and leaves PyTorch's command buffer in place with new content;
// where PyTorch's profiler forbids that, a new one takes its place, as after each of PyTorch's own graphs.
void commit_in_time(at::mps::MPSStream* stream, const Grid& encoded) {
  Work& work = work_since_commit(stream);
  ++work.dispatches;
  work.threads += encoded.x * encoded.y * encoded.threads;
  if (work.dispatches < tuning().commit_dispatches && work.threads < tuning().commit_threads) return;
  stream->synchronize(at::mps::SyncType::COMMIT);
  work = {};
}

}  // namespace

void launch(std::initializer_list<Dispatch> dispatches) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  const bool is_rehearsal = dispatches.begin()->arguments[0].tensor->is_meta();
  bool any = false;
  for (const Dispatch& dispatch : dispatches) {
    if (dispatch.grid.empty()) continue;
    if (!is_rehearsal) check_tensors(dispatch);
    pipeline_of(stream, dispatch.kernel);
    any = true;
  }
  if (!any || is_rehearsal) return;
  // A block copies what it captures: it gets a pointer.
  const auto* all = &dispatches;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      for (const Dispatch& dispatch : *all) {
        if (dispatch.grid.empty()) continue;
        id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();  // a commit has ended the one before
        // PyTorch's encoder is serial, so dispatches are ordered, also behind PyTorch's own; a concurrent one would
        // need to be told.
        if ([encoder dispatchType] == MTLDispatchTypeConcurrent)
          [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
        encode(encoder, dispatch.kernel.pipeline.load(), dispatch);
        commit_in_time(stream, dispatch.grid);
      }
    }
  });
}

}  // namespace moe_metal
