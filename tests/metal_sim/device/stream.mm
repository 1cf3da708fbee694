// at::mps:: for Linux: the symbols of ATen/mps/MPSStream.h and MPSDevice.h that libtorch_cpu has on macOS only.
#include <ATen/mps/MPSStream.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "sim.h"

namespace metal_sim {

namespace {
std::mutex queue_mutex;
std::atomic<std::thread::id> queue_holder;
uint64_t block_number = 0;  // guarded by queue_mutex

thread_local bool in_handler = false;  // of a command buffer, which Metal calls on a thread of its own

void sync_on(dispatch_queue_t queue, dispatch_block_t block) {
  if ((void*)queue != queue_object()) throw Violation("queue", "dispatch_sync on a queue that is not the stream's own");
  QueueScope scope("dispatch_sync");
  ++counters().blocks;
  auto* pool = [NSAutoreleasePool new];
  try {
    block();
  } catch (...) {
    end_encoder();  // a half-bound encoder must not reach the next op
    [pool drain];   // also drains the block's own pool, which an exception leaks
    throw;
  }
  [pool drain];
}
}  // namespace

void call_on_metals_thread(const std::function<void()>& handler) {
  std::thread([&] {
    in_handler = true;
    auto* pool = [NSAutoreleasePool new];
    try {
      handler();
    } catch (const std::exception& error) {
      note_fault("handler", std::string("a C++ exception left a handler, which terminates on macOS: ") + error.what());
    }
    [pool drain];
  }).join();
}

QueueScope::QueueScope(const char* what) {
  if (in_handler)
    throw Violation("deadlock", std::string(what) + " inside of a handler, which Metal calls while the stream's queue"
                                                    " may wait for that command buffer");
  if (on_queue())
    throw Violation(
        "deadlock",
        std::string(what) +
            " inside a block that already runs on the stream's queue: on macOS this deadlocks. Allocate outputs and"
            " call at:: ops before the block");
  queue_mutex.lock();
  queue_holder = std::this_thread::get_id();
  ++block_number;
}

QueueScope::~QueueScope() {
  queue_holder = std::thread::id();
  queue_mutex.unlock();
}

bool on_queue() { return queue_holder.load() == std::this_thread::get_id(); }
uint64_t queue_block() { return block_number; }

}  // namespace metal_sim

extern "C" void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  try {
    metal_sim::sync_on(queue, block);
  } catch (const std::exception& error) {
    throw metal_sim::Violation(
        "exception", std::string("a C++ exception left a plain dispatch_sync block, which terminates on macOS; use"
                                 " dispatch_sync_with_rethrow. It was: ") +
                         error.what());
  }
}

namespace at::mps {

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) { metal_sim::sync_on(queue, block); }

MPSStream::MPSStream(Stream stream) : _stream(stream) {
  _serialQueue = (dispatch_queue_t)metal_sim::queue_object();
  _commandQueue = (id<MTLCommandQueue>)metal_sim::command_queue_object();
  _commandBuffer = (MPSCommandBuffer*)metal_sim::command_buffer_object();
}
MPSStream::~MPSStream() = default;

MPSCommandBuffer* MPSStream::commandBuffer() {
  return _commandBuffer = (MPSCommandBuffer*)metal_sim::command_buffer_object();
}

id<MTLComputeCommandEncoder> MPSStream::commandEncoder() {
  if (!metal_sim::on_queue())
    throw metal_sim::Violation(
        "encoder", "commandEncoder() called off the stream's queue: call it in a dispatch_sync_with_rethrow block");
  return (id<MTLComputeCommandEncoder>)metal_sim::encoder_of_block();
}

void MPSStream::endKernelCoalescing() {
  throw metal_sim::Violation("encoder",
                             "endKernelCoalescing() called by an op: an op must leave the stream's encoder open");
}

void MPSStream::synchronize(SyncType type) {
  if (type != SyncType::COMMIT)
    throw metal_sim::Violation("encoder", "MPSStream::synchronize() called by an op with another SyncType than COMMIT:"
                                          " an op may hand work over, and must not wait");
  if (!metal_sim::on_queue())
    throw metal_sim::Violation(
        "encoder",
        "MPSStream::synchronize() called off the stream's queue: call it in a dispatch_sync_with_rethrow block");
  metal_sim::commit();
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler) {
  throw metal_sim::Violation("encoder", "addCompletedHandler() is not simulated");
}

MTLDevice_t MPSStream::device() const { return MPSDevice::getInstance()->device(); }

MPSStream* getDefaultMPSStream() {
  static auto* stream = new MPSStream(Stream(Stream::UNSAFE, Device(kMPS, 0), 0));
  return stream;
}
MPSStream* getCurrentMPSStream() { return getDefaultMPSStream(); }
MPSStream* MPSStreamImpl::getInstance() { return getDefaultMPSStream(); }

MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static auto* device = new MPSDevice();
  return device;
}
std::string MPSDevice::getName() const { return _mtl_device.name.UTF8String; }

bool is_available() { return true; }

}  // namespace at::mps
