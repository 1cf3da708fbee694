// Shared by the simulated Metal (metal.mm), the MPS stream (stream.mm) and the PyTorch device (device.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../engine/engine.h"  // Violation: reaches Python as a RuntimeError

namespace metal_sim {

// ---- buffers: a tensor's data pointer is an id<MTLBuffer>; its bytes are only reachable through this registry ----

struct Memory {
  char* bytes;
  size_t length;
  bool of_tensor;             // allocated by PyTorch: host code must not read it behind the stream's back
  bool is_given = false;      // by newBufferWithBytesNoCopy: whole pages of the caller
  bool is_read_only = false;  // which may be protected
};

void* new_tensor_buffer(size_t length);  // a retained id<MTLBuffer>
void release_buffer(void* buffer);
const Memory* find_memory(const void* buffer);             // null if this is not a live MTLBuffer
void check_guards();                                       // checks all guard words, and throws faults noted below
void check_written(const void* buffer, const char* what);  // throws if these are pages that nothing may write
size_t allocated_bytes();
size_t given_bytes();  // of the caller's pages in buffers

// ---- the stream's serial queue and its one encoder ----

// Holds the queue. Acquiring it twice on one thread is a deadlock, as with dispatch_sync.
class QueueScope {
 public:
  explicit QueueScope(const char* what);
  ~QueueScope();
  QueueScope(const QueueScope&) = delete;
};

bool on_queue();           // does this thread hold the queue?
uint64_t queue_block();    // the number of the block that holds it, for encoders kept past their block
void* encoder_of_block();  // the shared id<MTLComputeCommandEncoder>, usable until the running block ends
void end_encoder();        // as PyTorch's own ops do: the next encoder starts with nothing bound
void commit();             // the same by an op under test, which may still use the old encoder in its block
void complete();           // committed work has run: calls its handlers
void call_on_metals_thread(const std::function<void()>& handler);  // and wait for it
void* queue_object();                                              // the dispatch_queue_t
void* command_queue_object();
void* command_buffer_object();

// Notes a fault that is detected where nothing can be thrown (a destructor, GNUstep's log); the next check throws it.
void note_fault(const std::string& rule, const std::string& message);
void throw_noted_fault();

// ---- counting ----

// The binding of one [[buffer(n)]] of a dispatch.
struct Bound {
  uint32_t index;
  const void* contents;          // of the buffer; null for setBytes
  size_t offset, length;         // length: of the whole buffer
  std::vector<std::byte> bytes;  // of setBytes
};

struct Dispatch {
  std::string kernel, label;
  Size grid, threads;  // grid in threadgroups, or in threads when exact_threads
  bool exact_threads;
  size_t threadgroup_bytes;
  size_t buffer_bytes;    // from each bound offset to the end of its buffer, every buffer once
  size_t constant_bytes;  // setBytes
  double seconds;         // spent in the engine
  std::optional<Costs> costs;
  std::vector<Bound> arguments;
};

struct Counters {
  std::vector<Dispatch> dispatches;
  std::vector<std::string> host_syncs;       // ops that made the host wait for the device
  long commits = 0;                          // by MPSStream::synchronize(COMMIT)
  long blocks = 0;                           // that ran by dispatch_sync; guarded by the queue, like the next two
  long messages = 0;                         // to encoders
  long aten_ops = 0;                         // that ran for the device; on macOS each takes at least one block
  std::map<std::string, long> live_objects;  // not yet released, by protocol or class; tensors' buffers as "tensor"
  std::map<std::string, long> made_objects;  // made so far
};
Counters& counters();
std::mutex& counters_mutex();  // libraries are compiled and objects made without holding the queue
void count_host_sync(const std::string& op);

// The compile options of each library so far.
struct Compiled {
  int metal_version;
  bool safe, precise;  // maths mode, and maths functions
  bool concurrently;   // the device was allowed to compile as many at once as it can
};
std::vector<Compiled>& compiled();

// ---- set from Python between ops ----

struct Options {
  bool host_only = false;  // dispatches are checked and counted, and no kernel runs; fresh memory is not poisoned
  std::pair<long, long> macos = {26, 0};
  bool for_older_sdk =
      false;  // NSProcessInfo calls macOS 26 and newer 16, as in programs that were linked for older ones
  std::string gpu = "Simulated Metal device";
  long family = 1008;            // the newest Apple family of that GPU
  std::string commit_error;      // the error of committed command buffers; empty: none
  size_t more_threadgroups = 0;  // added along x to the grid of each dispatch
  bool concurrent = false;       // encoders order dispatches only by barriers
  bool flushes = false;          // each commit drops the command buffer, and the stream makes another
  bool records = false;          // ops get a proxy of the encoder that records their calls
  size_t max_buffer = size_t(9) << 30, working_set = size_t(16) << 30;
  bool local_volumes = true;  // files are on this machine
  bool takes_pages = true;    // newBufferWithBytesNoCopy succeeds
};
Options& options();

}  // namespace metal_sim
