// See launch.h. Objects created here are never released, on purpose, so that no destructors run at process exit.
#include "mps/launch.h"

#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "mps/pipelines.h"
#include "mps/tuning.h"

namespace moe_metal {
namespace {

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

// The data pointer of an MPS tensor's storage is its id<MTLBuffer>.
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

// Dispatches that are encoded later, with their arguments: buffers, and params as the last one.
struct Collected {
  struct Entry {
    const Pipeline* pipeline;
    Grid grid;
    size_t buffers, params, bytes;  // the number of buffers; where the params begin, and how many bytes they have
  };
  std::vector<Entry> dispatches;
  std::vector<Tensor> held;  // they stay alive until they are encoded
  std::vector<id<MTLBuffer>> buffers;
  std::vector<NSUInteger> offsets;
  std::vector<char> params;

  void add(const Dispatch& dispatch) {
    Entry entry = {dispatch.kernel.pipeline.load(), dispatch.grid, 0, params.size(), 0};
    for (int i = 0; i < dispatch.count; ++i) {
      const Argument& argument = dispatch.arguments[i];
      if (argument.bytes) {
        TORCH_INTERNAL_ASSERT(i + 1 == dispatch.count);
        const char* from = static_cast<const char*>(argument.bytes);
        params.insert(params.end(), from, from + argument.size);
        entry.bytes = argument.size;
        continue;
      }
      const Tensor& tensor = argument.tensor->defined() ? *argument.tensor : *dispatch.arguments[0].tensor;
      held.push_back(tensor);
      buffers.push_back((id<MTLBuffer>)tensor.storage().data());
      offsets.push_back(tensor.storage_offset() * tensor.element_size());
      ++entry.buffers;
    }
    dispatches.push_back(entry);
  }
  void encode(id<MTLComputeCommandEncoder> encoder, const Entry& dispatch, size_t first) const {
    [encoder setComputePipelineState:dispatch.pipeline->state];
    [encoder setBuffers:&buffers[first] offsets:&offsets[first] withRange:NSRange{0, dispatch.buffers}];
    if (dispatch.bytes) {
      [encoder setBytes:&params[dispatch.params] length:dispatch.bytes atIndex:dispatch.buffers];
    }
    [encoder dispatchThreadgroups:MTLSizeMake(dispatch.grid.x, dispatch.grid.y, 1)
            threadsPerThreadgroup:MTLSizeMake(dispatch.grid.threads, 1, 1)];
  }
  void clear() { dispatches.clear(), held.clear(), buffers.clear(), offsets.clear(), params.clear(); }
};

thread_local Collected* collected = nullptr;

// ---------------------------------------------------------------------------------------------- commits

// PyTorch commits encoded work only when a result is needed. Until then the GPU would idle, and macOS kills a command
// buffer that keeps the GPU busy for seconds (kIOGPUCommandBufferCallbackErrorImpactingInteractivity), silently losing
// its results. So we commit after a certain amount of work, without waiting for it. tuning.h has the amount.
struct Work {
  int64_t dispatches = 0, threads = 0;
};

// The work of a stream since our last commit. The returned object is only used on the stream's own queue.
Work& work_since_commit(const at::mps::MPSStream* stream) {
  static auto& mutex = *new std::mutex;
  static auto& of_streams = *new std::map<const at::mps::MPSStream*, Work>;
  std::lock_guard lock(mutex);
  return of_streams[stream];
}

// The first failed command buffer of those committed here, until it has been reported. Up to torch 2.14, PyTorch does
// not check command buffers and continues with whatever is in memory.
struct Failure {
  std::mutex mutex;
  std::string what;
  std::atomic<bool> is_there = false;  // checked at each launch
};

Failure& failure() {
  static auto& first = *new Failure;
  return first;
}

// Called on one of Metal's threads.
void note_failure(NSError* error, const std::string& when) {
  std::lock_guard lock(failure().mutex);
  if (failure().is_there) return;
  failure().what = when + ": " + reason(error);
  failure().is_there = true;
}

void raise_failure() {
  if (!failure().is_there) return;
  std::lock_guard lock(failure().mutex);
  if (!failure().is_there.exchange(false)) return;  // another thread has raised it
  TORCH_CHECK(false, "moe_metal: the GPU aborted earlier work, ", failure().what,
              "\nResults of that work and later ones may be wrong.");
}

// Whether PyTorch makes a new command buffer for each commit and keeps it forever, as it does for signposts and
// captures. Then we do not commit: PyTorch commits after each of its graphs anyway.
bool keeps_command_buffers() {
  const auto is_on = [](const char* variable) { return std::atoi(std::getenv(variable) ?: "0") != 0; };
  static const bool keeps = is_on("PYTORCH_MPS_TRACE_SIGNPOSTS") || is_on("MTL_CAPTURE_ENABLED");
  return keeps;
}

// Called on the stream's queue. A commit ends the stream's encoder; PyTorch then starts a new command buffer.
void commit_in_time(at::mps::MPSStream* stream, const Grid& encoded, const Pipeline* pipeline, int64_t most) {
  Work& work = work_since_commit(stream);
  ++work.dispatches;
  work.threads += encoded.x * encoded.y * encoded.threads;
  if (work.dispatches < most && work.threads < tuning().commit_threads) return;
  if (keeps_command_buffers()) return;
  const int64_t dispatches = work.dispatches;
  [stream->commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer> done) {
    if ([done status] != MTLCommandBufferStatusError) return;
    note_failure([done error], "after " + std::to_string(dispatches) + " of our kernels, the last of which was " +
                                   [pipeline->name UTF8String]);
  }];
  stream->synchronize(at::mps::SyncType::COMMIT);
  work = {};
}

// PyTorch's encoder, a new one after a commit. It is serial, so dispatches are ordered, also after PyTorch's own. A
// concurrent one would need a barrier.
id<MTLComputeCommandEncoder> encoder_of(at::mps::MPSStream* stream) {
  id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
  if ([encoder dispatchType] == MTLDispatchTypeConcurrent) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  return encoder;
}

}  // namespace

void launch(std::initializer_list<Dispatch> dispatches) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  const bool is_warmup = dispatches.begin()->arguments[0].tensor->is_meta();
  bool any = false;
  for (const Dispatch& dispatch : dispatches) {
    if (dispatch.grid.empty()) continue;
    if (is_warmup) {
      prepare(stream, dispatch.kernel);
      continue;
    }
    check_tensors(dispatch);
    pipeline_of(stream, dispatch.kernel);
    any = true;
  }
  if (!any) return;
  if (collected) {
    for (const Dispatch& dispatch : dispatches) {
      if (!dispatch.grid.empty()) collected->add(dispatch);
    }
    return;
  }
  raise_failure();
  // A block copies its captures, so it gets a pointer.
  const auto* all = &dispatches;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      for (const Dispatch& dispatch : *all) {
        if (dispatch.grid.empty()) continue;
        const Pipeline* pipeline = dispatch.kernel.pipeline.load();
        encode(encoder_of(stream), pipeline, dispatch);
        commit_in_time(stream, dispatch.grid, pipeline, tuning().commit_dispatches);
      }
    }
  });
}

// Calls of a tape (tape.h): their dispatches are collected and then encoded in one block, without debug groups. The
// encoding of a dispatch takes about a tenth of the time of an op of its own, so there are fewer commits.
void mps::together(c10::function_ref<void()> all) {
  constexpr int64_t kFewerCommits = 8;
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  raise_failure();
  static thread_local Collected of_thread;
  of_thread.clear();
  collected = &of_thread;
  try {
    all();
  } catch (...) {
    collected = nullptr;
    of_thread.clear();
    throw;
  }
  collected = nullptr;
  const auto* dispatches = &of_thread;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    @autoreleasepool {
      size_t first = 0;
      for (const Collected::Entry& dispatch : dispatches->dispatches) {
        dispatches->encode(encoder_of(stream), dispatch, first);
        first += dispatch.buffers;
        commit_in_time(stream, dispatch.grid, dispatch.pipeline, kFewerCommits * tuning().commit_dispatches);
      }
    }
  });
  of_thread.clear();
}

namespace {

// Watches the current command buffer, which has a check of the kernels.
void watch() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    [stream->commandBuffer() addCompletedHandler:^(id<MTLCommandBuffer> done) {
      if ([done status] == MTLCommandBufferStatusError) note_failure([done error], "in a check of the kernels");
    }];
  });
}

}  // namespace

}  // namespace moe_metal

// Only for first_use.py.
TORCH_LIBRARY_FRAGMENT(moe_metal, m) {
  m.def("_watch() -> ()", &moe_metal::watch);
  m.def("_raise_failure() -> ()", &moe_metal::raise_failure);
}
