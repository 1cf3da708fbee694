// Ops that each break one rule of Metal or of PyTorch's stream (../README.md lists the rules), to test that the
// simulator detects them. `torch.ops.metal_sim_misuse.run(name, x)`; x is a float tensor of at least 64 elements.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <sys/sysctl.h>
#include <torch/library.h>

#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Encoder = id<MTLComputeCommandEncoder>;
using Pipeline = id<MTLComputePipelineState>;

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void write_value(device float* out [[buffer(0)]], constant float& value [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = value;
}
kernel void shared(device float* out [[buffer(0)]], threadgroup float* scratch [[threadgroup(0)]],
                   uint i [[thread_position_in_threadgroup]]) {
  scratch[i] = out[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = scratch[i] + 1.0f;
}
)";

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

Pipeline pipeline(const char* name) {
  static std::map<std::string, Pipeline> made;
  if (made.count(name)) return made[name];
  @autoreleasepool {
    NSError* error = nil;
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    options.mathMode = MTLMathModeSafe;
    id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kSource]
                                                    options:options
                                                      error:&error];
    TORCH_CHECK(library, error.localizedDescription.UTF8String);
    id<MTLFunction> function = [library newFunctionWithName:[NSString stringWithUTF8String:name]];
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor new] autorelease];
    descriptor.computeFunction = function;
    descriptor.label = function.name;
    descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth = YES;
    made[name] = [device() newComputePipelineStateWithDescriptor:descriptor
                                                         options:MTLPipelineOptionNone
                                                      reflection:nil
                                                           error:&error];
    [function release];
    [library release];
    return made[name];
  }
}

void on_queue(void (^block)(Encoder)) {
  auto* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      block(stream->commandEncoder());
    }
  });
}

void bind(Encoder encoder, const Tensor& x, int index) {
  [encoder setBuffer:(id<MTLBuffer>)x.storage().data() offset:x.storage_offset() * x.element_size() atIndex:index];
}

// A correct `fill`; the misuses change one thing each.
void set_up_fill(Encoder encoder, const Tensor& x, float value = 1) {
  [encoder setComputePipelineState:pipeline("write_value")];
  bind(encoder, x, 0);
  [encoder setBytes:&value length:sizeof(value) atIndex:1];
}

void go(Encoder encoder, int groups = 1, int threads = 32) {
  [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

void commit_with(MTLCommandBufferHandler handler) {
  [at::mps::getCurrentMPSStream()->commandBuffer() addCompletedHandler:handler];
  at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
}

Encoder kept = nil;
std::vector<std::pair<NSUInteger, std::string>> completed;  // status and error of command buffers

// Two of the system's pages.
char* pages(int protection) {
  return static_cast<char*>(mmap(nullptr, 2 * getpagesize(), protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

id<MTLBuffer> buffer_over(char* at, size_t length) {
  return [device() newBufferWithBytesNoCopy:at length:length options:MTLResourceStorageModeShared deallocator:nil];
}

void fill_pages(const Tensor& x, id<MTLBuffer> buffer) {
  on_queue(^(Encoder e) {
    set_up_fill(e, x);
    [e setBuffer:buffer offset:0 atIndex:0];
    go(e);
  });
}

using Rule = void (*)(const Tensor&);
const std::map<std::string, Rule> rules = {
    // ---- correct uses ----
    {"fill",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x, 3);
         go(e, 2);
       });
     }},
    {"exact_threads",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x, 3);
         [e dispatchThreads:MTLSizeMake(40, 1, 1) threadsPerThreadgroup:MTLSizeMake(32, 1, 1)];
       });
     }},
    {"shared",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         [e setComputePipelineState:pipeline("shared")];
         bind(e, x, 0);
         [e setThreadgroupMemoryLength:64 * 4 atIndex:0];
         go(e, 1, 64);
       });
     }},
    {"fill_and_commit",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x, 1);
         go(e, 1);
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
         Encoder next = at::mps::getCurrentMPSStream()->commandEncoder();
         set_up_fill(next, x, 3);
         go(next, 2);
       });
     }},
    {"commit_with_handlers",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x, 3);
         go(e, 2);
         commit_with(^(id<MTLCommandBuffer> done) {
           completed.push_back({done.status, done.error ? done.error.localizedDescription.UTF8String : ""});
         });
       });
     }},
    {"handler_off_queue",
     [](const Tensor&) {
       [at::mps::getCurrentMPSStream()->commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer>){
       }];
     }},
    {"handler_takes_the_queue",
     [](const Tensor& x) {
       on_queue(^(Encoder) {
         commit_with(^(id<MTLCommandBuffer>) {
           on_queue(^(Encoder){
           });
         });
       });
     }},
    {"handler_throws",
     [](const Tensor& x) {
       on_queue(^(Encoder) {
         commit_with(^(id<MTLCommandBuffer>) {
           throw std::runtime_error("from the handler");
         });
       });
     }},
    {"ordered",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         for (float value : {1.0f, 3.0f}) {
           [e memoryBarrierWithScope:MTLBarrierScopeBuffers];
           set_up_fill(e, x, value);
           go(e, 2);
         }
       });
     }},
    {"ordered_among_themselves",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x, 1);
         go(e, 2);
         [e memoryBarrierWithScope:MTLBarrierScopeBuffers];
         set_up_fill(e, x, 3);
         go(e, 2);
       });
     }},
    {"compile_only",
     [](const Tensor&) {
       @autoreleasepool {
         id<MTLLibrary> library = [device() newLibraryWithSource:@"kernel void f() {}" options:nil error:nil];
         [library release];
       }
     }},
    {"throw_in_block",
     [](const Tensor&) {
       on_queue(^(Encoder) {
         TORCH_CHECK(false, "from inside the block");
       });
     }},
    {"throw_std_in_block",
     [](const Tensor&) {
       on_queue(^(Encoder) {
         throw std::runtime_error("from std");
       });
     }},
    // ---- the encoder and the queue ----
    {"encoder_off_queue", [](const Tensor&) { at::mps::getCurrentMPSStream()->commandEncoder(); }},
    {"encoder_after_block",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         kept = e;
       });
       set_up_fill(kept, x);
     }},
    {"encoder_in_later_block",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         kept = e;
       });
       at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
         set_up_fill(kept, x);
       });
     }},
    {"end_encoding",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         [e endEncoding];
       });
     }},
    {"encoder_after_commit",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
         set_up_fill(e, x);
       });
     }},
    {"stale_after_commit",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e);
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
         go(at::mps::getCurrentMPSStream()->commandEncoder());
       });
     }},
    {"command_buffer_after_commit",
     [](const Tensor&) {
       on_queue(^(Encoder) {
         auto* buffer = at::mps::getCurrentMPSStream()->commandBuffer();
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT);
         [buffer addCompletedHandler:^(id<MTLCommandBuffer>){
         }];
       });
     }},
    {"commit_off_queue", [](const Tensor&) { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT); }},
    {"commit_and_continue",
     [](const Tensor&) {
       on_queue(^(Encoder) {
         at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_CONTINUE);
       });
     }},
    {"own_commit_and_continue",
     [](const Tensor&) { [at::mps::getCurrentMPSStream()->commandBuffer() commitAndContinue]; }},
    {"commit", [](const Tensor&) { [at::mps::getCurrentMPSStream()->commandBuffer() commit]; }},
    {"wait", [](const Tensor&) { [at::mps::getCurrentMPSStream()->commandBuffer() waitUntilCompleted]; }},
    {"own_encoder", [](const Tensor&) { [at::mps::getCurrentMPSStream()->commandBuffer() computeCommandEncoder]; }},
    {"own_queue", [](const Tensor&) { [device() newCommandQueue]; }},
    {"end_coalescing", [](const Tensor&) { at::mps::getCurrentMPSStream()->endKernelCoalescing(); }},
    {"synchronize",
     [](const Tensor&) { at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT); }},
    {"nested_queue",
     [](const Tensor&) {
       on_queue(^(Encoder) {
         on_queue(^(Encoder){
         });
       });
     }},
    {"aten_in_block",
     [](const Tensor& x) {
       on_queue(^(Encoder) {
         x.add_(1);
       });
     }},
    {"copy_in_block",
     [](const Tensor& x) {
       on_queue(^(Encoder) {
         x.cpu();
       });
     }},
    {"throw_through_plain_sync",
     [](const Tensor&) {
       dispatch_sync(at::mps::getCurrentMPSStream()->queue(), ^{
         throw std::runtime_error("lost");
       });
     }},
    {"unbalanced_pop",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         [e popDebugGroup];
       });
     }},
    {"host_reads_tensor", [](const Tensor& x) { [(id<MTLBuffer>)x.storage().data() contents]; }},
    // ---- arguments ----
    {"cpu_tensor",
     [](const Tensor& x) {
       Tensor cpu = x.cpu();
       on_queue(^(Encoder e) {
         bind(e, cpu, 0);
       });
     }},
    {"bytes_4097",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         char b[4097];
         [e setBytes:b length:4097 atIndex:0];
       });
     }},
    {"bytes_0",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         char b[1];
         [e setBytes:b length:0 atIndex:0];
       });
     }},
    {"offset_at_end",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         [e setBuffer:(id<MTLBuffer>)x.storage().data() offset:x.storage().nbytes() atIndex:0];
       });
     }},
    {"index_31",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         bind(e, x, 31);
       });
     }},
    {"unbound",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         [e setComputePipelineState:pipeline("write_value")];
         bind(e, x, 0);
         go(e);
       });
     }},
    {"stale",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e);
         [e setComputePipelineState:pipeline("write_value")];
         bind(e, x, 0);
         go(e);
       });
     }},
    {"stale_from_earlier_op",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e);
       });
       on_queue(^(Encoder e) {
         [e setComputePipelineState:pipeline("write_value")];
         go(e);
       });
     }},
    // ---- launches ----
    {"no_pipeline",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         go(e);
       });
     }},
    {"empty_grid",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e, 0);
       });
     }},
    {"threads_1056",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e, 1, 1056);
       });
     }},
    {"threads_not_32",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e, 1, 33);
       });
     }},
    {"threadgroup_33_kb",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         [e setComputePipelineState:pipeline("shared")];
         bind(e, x, 0);
         [e setThreadgroupMemoryLength:33 * 1024 atIndex:0];
         go(e);
       });
     }},
    {"threadgroup_17_bytes",
     [](const Tensor&) {
       on_queue(^(Encoder e) {
         [e setThreadgroupMemoryLength:17 atIndex:0];
       });
     }},
    {"out_of_bounds",
     [](const Tensor& x) {
       on_queue(^(Encoder e) {
         set_up_fill(e, x);
         go(e, 1000);
       });
     }},
    // ---- objects ----
    {"leak_buffer", [](const Tensor&) { [device() newBufferWithLength:16 options:MTLResourceStorageModeShared]; }},
    {"leak_library",
     [](const Tensor&) {
       @autoreleasepool {
         [device() newLibraryWithSource:@"kernel void f() {}" options:nil error:nil];
       }
     }},
    {"autorelease_without_pool",
     [](const Tensor&) {
       [[MTLCompileOptions new] autorelease];
       on_queue(^(Encoder e) {
         [e insertDebugSignpost:@"x"];
       });
     }},
    {"bad_source",
     [](const Tensor&) {
       @autoreleasepool {
         NSError* error = nil;
         id<MTLLibrary> library = [device() newLibraryWithSource:@"kernel void f() { oops; }" options:nil error:&error];
         TORCH_CHECK(library, "compiler: ", error.localizedDescription.UTF8String);
       }
     }},
    {"metal_4",
     [](const Tensor&) {
       @autoreleasepool {
         NSError* error = nil;
         MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
         options.languageVersion = MTLLanguageVersion4_0;
         id<MTLLibrary> library = [device() newLibraryWithSource:@"kernel void f() {}" options:options error:&error];
         TORCH_CHECK(library, "compiler: ", error.localizedDescription.UTF8String);
         [library release];
       }
     }},
    {"math_mode",
     [](const Tensor&) {
       @autoreleasepool {
         MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
         options.mathMode = MTLMathModeRelaxed;
         options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
         [[device() newLibraryWithSource:@"kernel void f() {}" options:options error:nil] release];
       }
     }},
    {"no_fast_math",
     [](const Tensor&) {
       @autoreleasepool {
         MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
         options.fastMathEnabled = NO;
         [[device() newLibraryWithSource:@"kernel void f() {}" options:options error:nil] release];
       }
     }},
    {"part_of_a_page", [](const Tensor&) { buffer_over(pages(PROT_READ), 100); }},
    {"inside_a_page", [](const Tensor&) { buffer_over(pages(PROT_READ) + 64, getpagesize()); }},
    {"too_long", [](const Tensor&) { buffer_over(pages(PROT_READ), (size_t{9} << 30) + getpagesize()); }},
    {"kernel_writes_read_only_pages",
     [](const Tensor& x) { fill_pages(x, buffer_over(pages(PROT_READ), getpagesize())); }},
    {"pages_unmapped_too_early",
     [](const Tensor& x) {
       char* at = pages(PROT_READ | PROT_WRITE);
       id<MTLBuffer> buffer = buffer_over(at, getpagesize());
       munmap(at, 2 * getpagesize());
       fill_pages(x, buffer);
     }},
    {"write_after",
     [](const Tensor& x) {
       id<MTLBuffer> buffer = (id<MTLBuffer>)x.storage().data();
       std::memset(reinterpret_cast<char*>(buffer.gpuAddress) + buffer.length, 0, 1);
     }},
    {"mend_after",
     [](const Tensor& x) {
       id<MTLBuffer> buffer = (id<MTLBuffer>)x.storage().data();
       std::memset(reinterpret_cast<char*>(buffer.gpuAddress) + buffer.length, 0xA5, 1);
     }},
};

std::string machine() {
  @autoreleasepool {
    std::string text = device().name.UTF8String, release(32, '\0');
    text += ", family";
    for (int family : {7, 8}) {
      if ([device() supportsFamily:MTLGPUFamily(1000 + family)]) text += " " + std::to_string(family);
    }
    const auto version = [[NSProcessInfo processInfo] operatingSystemVersion];
    size_t size = release.size();
    sysctlbyname("kern.osrelease", release.data(), &size, nullptr, 0);
    release.resize(size - 1);
    return text + ", macOS " + std::to_string(version.majorVersion) + "." + std::to_string(version.minorVersion) +
           ", Darwin " + release;
  }
}

void run(const std::string& name, const Tensor& x) {
  TORCH_CHECK(rules.count(name), "metal_sim_misuse: no rule named ", name);
  rules.at(name)(x);
}

TORCH_LIBRARY(metal_sim_misuse, m) {
  m.def("run(str name, Tensor(a!) x) -> ()");
  m.impl("run", c10::DispatchKey::MPS, &run);
  m.def("machine() -> str", &machine);
  m.def("completed() -> str", [] {
    std::string text;
    for (const auto& [status, error] : std::exchange(completed, {})) text += std::to_string(status) + error + ";";
    return text;
  });
  // It has no kernel for mps: the boxed fallback must refuse it instead of running the CPU's.
  m.def("cpu_only(Tensor x) -> Tensor");
  m.impl("cpu_only", c10::DispatchKey::CPU, [](const Tensor& x) { return x.clone(); });
}

}  // namespace
