// The simulated Metal: the objects behind headers/Metal/Metal.h. Kernels run immediately, inside the dispatch call, so
// that a broken rule is reported at the line that broke it. Objective-C state is kept in C++ structs.
#include <Block.h>
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <unordered_map>

#include "sim.h"

using metal_sim::Violation;

// ---- shared state ----

namespace metal_sim {

Options& options() {
  static Options value;
  return value;
}

Counters& counters() {
  static auto* value = new Counters;  // outlives every object that is counted
  return *value;
}

std::vector<Compiled>& compiled() {
  static auto* value = new std::vector<Compiled>;
  return *value;
}

std::mutex& counters_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

namespace {
void count_object(const char* kind, long change) {
  std::lock_guard lock(counters_mutex());
  counters().live_objects[kind] += change;
  if (change > 0) counters().made_objects[kind] += change;
}

void count_library(Compiled options) {
  std::lock_guard lock(counters_mutex());
  compiled().push_back(options);
}

void count_dispatch(Dispatch dispatch) {
  std::lock_guard lock(counters_mutex());
  counters().dispatches.push_back(std::move(dispatch));
}

std::mutex fault_mutex;
std::unique_ptr<Violation> fault;
std::atomic<bool> is_fault = false;  // checked by every call of the encoder
}  // namespace

void count_host_sync(const std::string& op) {
  std::lock_guard lock(counters_mutex());
  counters().host_syncs.push_back(op);
}

void note_fault(const std::string& rule, const std::string& message) {
  std::lock_guard lock(fault_mutex);
  if (!fault) fault = std::make_unique<Violation>(rule, message);
  is_fault = true;
}

void throw_noted_fault() {
  if (!is_fault) return;
  std::unique_lock lock(fault_mutex);
  is_fault = false;
  if (auto noted = std::exchange(fault, nullptr)) throw Violation(*noted);
}

}  // namespace metal_sim

static id<MTLDevice> shared_device();

// Counts the live instances of each class, so that tests can detect leaks.
@interface SimObject : NSObject {
  NSString* _label;
}
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
+ (const char*)kind;
@end

@implementation SimObject
+ (const char*)kind {
  return class_getName(self);
}
+ (id)allocWithZone:(NSZone*)zone {
  metal_sim::count_object([self kind], 1);
  return [super allocWithZone:zone];
}
- (void)dealloc {
  metal_sim::count_object([[self class] kind], -1);
  [_label release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return shared_device();
}
- (NSString*)label {
  return _label;
}
- (void)setLabel:(NSString*)label {
  [_label autorelease];
  _label = [label copy];
}
@end

static std::string text(NSString* string) { return string ? string.UTF8String : ""; }

static void fail(NSError** error, const std::string& message) {
  if (!error) return;
  NSDictionary* info = @{NSLocalizedDescriptionKey : [NSString stringWithUTF8String:message.c_str()]};
  *error = [NSError errorWithDomain:@"MTLLibraryErrorDomain" code:3 userInfo:info];
}

// ---- buffers ----

namespace metal_sim {
namespace {
// Guard bytes around each buffer, which nothing may write. Metal aligns a buffer to a page; code may only rely on 256
// bytes, so simulated buffers are never aligned to more than that.
constexpr size_t guard_bytes = 256;
constexpr unsigned char guard_value = 0xA5;
// Fresh memory is NaN in every float type and -1 in every integer type, so that unwritten outputs are noticed.
constexpr unsigned char poison_value = 0xFF;
// Larger buffers are not poisoned, because tests touch only parts of them. Neither are buffers in host_only mode, where
// the host's time is measured.
constexpr size_t poison_limit = size_t(1) << 30;

std::mutex memory_mutex;
std::unordered_map<const void*, Memory> memories;
size_t total_bytes = 0, total_given = 0;

Memory allocate(size_t length, bool of_tensor) {
  const size_t total = (guard_bytes + length + guard_bytes + 511) / 512 * 512;
  auto* start = static_cast<char*>(std::aligned_alloc(512, total));
  if (!start) throw std::bad_alloc();
  std::memset(start, guard_value, guard_bytes);
  std::memset(start + guard_bytes + length, guard_value, guard_bytes);
  if (length <= poison_limit && !options().host_only) std::memset(start + guard_bytes, poison_value, length);
  return {start + guard_bytes, length, of_tensor};
}

// Whether the first byte has the value, and every other byte equals the one before it.
bool intact(const char* guard) {
  return static_cast<unsigned char>(*guard) == guard_value && !std::memcmp(guard, guard + 1, guard_bytes - 1);
}

std::string broken_guard(const Memory& memory) {
  if (memory.is_given) return "";
  const char* side = !intact(memory.bytes - guard_bytes)     ? "before"
                     : !intact(memory.bytes + memory.length) ? "after"
                                                             : "";
  if (!*side) return "";
  return std::string("something wrote ") + side + " a buffer of " + std::to_string(memory.length) + " bytes";
}
}  // namespace

const Memory* find_memory(const void* buffer) {
  std::lock_guard lock(memory_mutex);
  auto found = memories.find(buffer);
  return found == memories.end() ? nullptr : &found->second;
}

void check_guards() {
  throw_noted_fault();
  std::lock_guard lock(memory_mutex);
  for (auto& [buffer, memory] : memories)
    if (auto what = broken_guard(memory); !what.empty()) throw Violation("guard", what);
}

bool is_mapped(const Memory& memory) { return msync(memory.bytes, memory.length, MS_ASYNC) == 0; }

// Whether this process may not write some of these pages.
bool is_read_only(const char* bytes, size_t length) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t rest = 0;
    const uint64_t begin = std::stoull(line, &rest, 16), end = std::stoull(line.substr(rest + 1), nullptr, 16);
    const auto first = reinterpret_cast<uint64_t>(bytes);
    if (begin < first + length && first < end && line[line.find(' ') + 2] != 'w') return true;
  }
  return false;
}

void check_written(const void* buffer, const char* what) {
  const Memory* memory = find_memory(buffer);
  if (memory && memory->is_read_only)
    throw Violation("read_only", std::string(what) + " writes a buffer over pages that are read-only");
}

size_t given_bytes() {
  std::lock_guard lock(memory_mutex);
  return total_given;
}

size_t allocated_bytes() {
  std::lock_guard lock(memory_mutex);
  return total_bytes;
}

}  // namespace metal_sim

@interface SimBuffer : SimObject <MTLBuffer>
- (id)initWithLength:(NSUInteger)length ofTensor:(bool)ofTensor;
@end

@implementation SimBuffer
+ (const char*)kind {
  return "MTLBuffer";
}
- (id)initWithLength:(NSUInteger)length ofTensor:(bool)ofTensor {
  if (!(self = [super init])) return nil;
  std::lock_guard lock(metal_sim::memory_mutex);
  metal_sim::memories[self] = metal_sim::allocate(length, ofTensor);
  metal_sim::total_bytes += length;
  return self;
}
- (void)dealloc {
  {
    std::lock_guard lock(metal_sim::memory_mutex);
    const metal_sim::Memory memory = metal_sim::memories.at(self);
    if (auto what = metal_sim::broken_guard(memory); !what.empty()) metal_sim::note_fault("guard", what);
    metal_sim::memories.erase(self);
    metal_sim::total_bytes -= memory.length;
    std::free(memory.bytes - metal_sim::guard_bytes);
  }
  [super dealloc];
}
- (NSUInteger)length {
  return metal_sim::find_memory(self)->length;
}
- (NSUInteger)allocatedSize {
  return [self length];
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(metal_sim::find_memory(self)->bytes);
}
- (void*)contents {
  if (metal_sim::find_memory(self)->of_tensor)
    throw Violation("host_access", "[MTLBuffer contents] of a tensor: the device may not have written it yet");
  return metal_sim::find_memory(self)->bytes;
}
- (MTLCPUCacheMode)cpuCacheMode {
  return MTLCPUCacheModeDefaultCache;
}
- (MTLStorageMode)storageMode {
  return MTLStorageModeShared;
}
- (MTLHazardTrackingMode)hazardTrackingMode {
  return MTLHazardTrackingModeTracked;
}
- (MTLResourceOptions)resourceOptions {
  return MTLResourceStorageModeShared;
}
@end

// A buffer over the caller's pages. Its end calls the deallocator, once.
@interface SimPagesBuffer : SimBuffer {
  void (^_deallocator)(void*, NSUInteger);
}
- (id)initWithPages:(void*)pages length:(NSUInteger)length deallocator:(void (^)(void*, NSUInteger))deallocator;
@end

@implementation SimPagesBuffer
+ (const char*)kind {
  return "MTLBuffer over pages";
}
- (id)initWithPages:(void*)pages length:(NSUInteger)length deallocator:(void (^)(void*, NSUInteger))deallocator {
  const auto page = static_cast<size_t>(getpagesize());
  if (reinterpret_cast<uint64_t>(pages) % page || length == 0 || length % page)
    throw Violation("no_copy", "newBufferWithBytesNoCopy: expected whole pages of " + std::to_string(page) + " bytes");
  if (length > metal_sim::options().max_buffer)
    throw Violation("no_copy", "newBufferWithBytesNoCopy: " + std::to_string(length) + " bytes; maxBufferLength is " +
                                   std::to_string(metal_sim::options().max_buffer));
  metal_sim::Memory memory = {static_cast<char*>(pages), length, false, true};
  if (!metal_sim::is_mapped(memory)) throw Violation("no_copy", "newBufferWithBytesNoCopy: these pages are not mapped");
  memory.is_read_only = metal_sim::is_read_only(memory.bytes, length);
  if (!(self = [super init])) return nil;
  if (deallocator) _deallocator = Block_copy(deallocator);
  std::lock_guard lock(metal_sim::memory_mutex);
  metal_sim::memories[self] = memory;
  metal_sim::total_given += length;
  return self;
}
- (void)dealloc {
  const metal_sim::Memory memory = *metal_sim::find_memory(self);
  {
    std::lock_guard lock(metal_sim::memory_mutex);
    metal_sim::memories[self] = metal_sim::allocate(0, false);  // for the base class
    metal_sim::total_given -= memory.length;
  }
  if (_deallocator) {
    metal_sim::call_on_metals_thread([&] { _deallocator(memory.bytes, memory.length); });
    Block_release(_deallocator);
  }
  [super dealloc];
}
@end

@interface SimTensorBuffer : SimBuffer
@end
@implementation SimTensorBuffer
+ (const char*)kind {
  return "tensor";
}
@end

namespace metal_sim {
void* new_tensor_buffer(size_t length) { return [[SimTensorBuffer alloc] initWithLength:length ofTensor:true]; }
void release_buffer(void* buffer) { [(SimBuffer*)buffer release]; }
}  // namespace metal_sim

// ---- options and descriptors: concrete classes in Metal, so alloc returns a subclass that has the values ----

namespace metal_sim {
namespace {
void must_be_macos_15(const char* selector, const char* of = "MTLCompileOptions") {
  if (options().macos.first >= 15) return;
  throw Violation("selector", std::string("-[") + of + " " + selector + "]: unrecognized selector before macOS 15");
}
}  // namespace
}  // namespace metal_sim

#define SIM_VALUE(type, name, Setter) \
  -(type)name {                       \
    return _##name;                   \
  }                                   \
  -(void)set##Setter : (type)value {  \
    _##name = value;                  \
  }

@interface SimCompileOptions : MTLCompileOptions {
  NSDictionary* _preprocessorMacros;
  BOOL _fastMathEnabled, _preserveInvariance;
  MTLMathMode _mathMode;
  MTLMathFloatingPointFunctions _mathFloatingPointFunctions;
  MTLLanguageVersion _languageVersion;
  MTLLibraryOptimizationLevel _optimizationLevel;
  NSUInteger _maxTotalThreadsPerThreadgroup;
}
@end

@implementation MTLCompileOptions
@dynamic preprocessorMacros, fastMathEnabled, mathMode, mathFloatingPointFunctions, languageVersion;
@dynamic preserveInvariance, optimizationLevel, maxTotalThreadsPerThreadgroup;
+ (id)allocWithZone:(NSZone*)zone {
  metal_sim::count_object("MTLCompileOptions", 1);
  return NSAllocateObject([SimCompileOptions class], 0, zone);
}
- (id)copyWithZone:(NSZone*)zone {
  throw Violation("unsupported", "copying MTLCompileOptions is not simulated");
}
@end

@implementation SimCompileOptions
- (id)init {
  if (!(self = [super init])) return nil;
  _fastMathEnabled = YES;  // Metal's default
  _mathMode = MTLMathModeFast;
  _languageVersion = metal_sim::options().macos.first >= 26 ? MTLLanguageVersion4_0 : MTLLanguageVersion3_1;
  return self;
}
- (void)dealloc {
  [_preprocessorMacros release];
  metal_sim::count_object("MTLCompileOptions", -1);
  [super dealloc];
}
- (NSDictionary*)preprocessorMacros {
  return _preprocessorMacros;
}
- (void)setPreprocessorMacros:(NSDictionary*)macros {
  [_preprocessorMacros autorelease];
  _preprocessorMacros = [macros copy];
}
- (MTLMathMode)mathMode {
  return _mathMode;
}
- (void)setMathMode:(MTLMathMode)mode {
  metal_sim::must_be_macos_15("setMathMode:");
  _mathMode = mode;
  _fastMathEnabled = mode == MTLMathModeFast;
}
- (BOOL)fastMathEnabled {
  return _fastMathEnabled;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  _fastMathEnabled = enabled;
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
  _mathFloatingPointFunctions = enabled ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
}
- (MTLMathFloatingPointFunctions)mathFloatingPointFunctions {
  return _mathFloatingPointFunctions;
}
- (void)setMathFloatingPointFunctions:(MTLMathFloatingPointFunctions)functions {
  metal_sim::must_be_macos_15("setMathFloatingPointFunctions:");
  _mathFloatingPointFunctions = functions;
}
SIM_VALUE(MTLLanguageVersion, languageVersion, LanguageVersion)
SIM_VALUE(BOOL, preserveInvariance, PreserveInvariance)
SIM_VALUE(MTLLibraryOptimizationLevel, optimizationLevel, OptimizationLevel)
SIM_VALUE(NSUInteger, maxTotalThreadsPerThreadgroup, MaxTotalThreadsPerThreadgroup)
@end

@interface SimComputePipelineDescriptor : MTLComputePipelineDescriptor {
  NSString* _label;
  id<MTLFunction> _computeFunction;
  BOOL _threadGroupSizeIsMultipleOfThreadExecutionWidth;
  NSUInteger _maxTotalThreadsPerThreadgroup;
}
@end

@implementation MTLComputePipelineDescriptor
@dynamic label, computeFunction, threadGroupSizeIsMultipleOfThreadExecutionWidth, maxTotalThreadsPerThreadgroup;
+ (id)allocWithZone:(NSZone*)zone {
  metal_sim::count_object("MTLComputePipelineDescriptor", 1);
  return NSAllocateObject([SimComputePipelineDescriptor class], 0, zone);
}
- (id)copyWithZone:(NSZone*)zone {
  throw Violation("unsupported", "copying MTLComputePipelineDescriptor is not simulated");
}
- (void)reset {
  throw Violation("unsupported", "-[MTLComputePipelineDescriptor reset] is not simulated");
}
@end

@implementation SimComputePipelineDescriptor
- (void)dealloc {
  [_label release];
  [_computeFunction release];
  metal_sim::count_object("MTLComputePipelineDescriptor", -1);
  [super dealloc];
}
- (NSString*)label {
  return _label;
}
- (void)setLabel:(NSString*)label {
  [_label autorelease];
  _label = [label copy];
}
- (id<MTLFunction>)computeFunction {
  return _computeFunction;
}
- (void)setComputeFunction:(id<MTLFunction>)function {
  [_computeFunction autorelease];
  _computeFunction = [function retain];
}
SIM_VALUE(BOOL, threadGroupSizeIsMultipleOfThreadExecutionWidth, ThreadGroupSizeIsMultipleOfThreadExecutionWidth)
SIM_VALUE(NSUInteger, maxTotalThreadsPerThreadgroup, MaxTotalThreadsPerThreadgroup)
@end

@implementation MTLFunctionConstantValues
+ (id)allocWithZone:(NSZone*)zone {
  throw Violation("unsupported", "function constants are not simulated: use template instantiations");
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
}
- (void)reset {
}
@end

// ---- residency ----

@implementation MTLResidencySetDescriptor
@dynamic label, initialCapacity;
+ (id)allocWithZone:(NSZone*)zone {
  metal_sim::must_be_macos_15("alloc", "MTLResidencySetDescriptor");
  return [super allocWithZone:zone];
}
- (id)copyWithZone:(NSZone*)zone {
  throw Violation("unsupported", "copying MTLResidencySetDescriptor is not simulated");
}
@end

// It only counts the buffers that are requested to be resident, as "resident".
@interface SimResidencySet : SimObject <MTLResidencySet> {
  NSMutableArray *_added, *_committed;
  NSUInteger _resident;
}
@end

@implementation SimResidencySet
+ (const char*)kind {
  return "MTLResidencySet";
}
- (id)init {
  if (!(self = [super init])) return nil;
  _added = [NSMutableArray new];
  _committed = [NSMutableArray new];
  return self;
}
- (void)dealloc {
  [self endResidency];
  [_added release];
  [_committed release];
  [super dealloc];
}
- (uint64_t)allocatedSize {
  uint64_t size = 0;
  for (id<MTLBuffer> buffer in _committed) size += buffer.length;
  return size;
}
- (void)addAllocation:(id<MTLAllocation>)allocation {
  [_added addObject:allocation];
}
- (void)removeAllAllocations {
  [_added removeAllObjects];
}
- (void)commit {
  [_committed setArray:_added];
}
- (void)requestResidency {
  [self endResidency];
  _resident = _committed.count;
  metal_sim::count_object("resident", long(_resident));
}
- (void)endResidency {
  metal_sim::count_object("resident", -long(_resident));
  _resident = 0;
}
@end

// ---- libraries, functions, pipelines ----

// Objects from a library keep the library loaded. A kernel lives as long as its library.
@interface SimLoaded : SimObject {
 @public
  std::shared_ptr<metal_sim::Library>* library;
  const metal_sim::Kernel* kernel;
}
- (id)initWithLibrary:(const std::shared_ptr<metal_sim::Library>&)from kernel:(const metal_sim::Kernel*)found;
@end

@implementation SimLoaded
- (id)initWithLibrary:(const std::shared_ptr<metal_sim::Library>&)from kernel:(const metal_sim::Kernel*)found {
  if (!(self = [super init])) return nil;
  library = new std::shared_ptr<metal_sim::Library>(from);
  kernel = found;
  return self;
}
- (void)dealloc {
  delete library;
  [super dealloc];
}
@end

@interface SimFunction : SimLoaded <MTLFunction>
@end

@implementation SimFunction
+ (const char*)kind {
  return "MTLFunction";
}
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
- (NSString*)name {
  return [NSString stringWithUTF8String:kernel->name.c_str()];
}
@end

@interface SimLibrary : SimLoaded <MTLLibrary>
@end

@implementation SimLibrary
+ (const char*)kind {
  return "MTLLibrary";
}
- (NSArray*)functionNames {
  NSMutableArray* names = [NSMutableArray array];
  for (auto& name : (*library)->names()) [names addObject:[NSString stringWithUTF8String:name.c_str()]];
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  const metal_sim::Kernel* found = (*library)->find(text(name));
  return found ? [[SimFunction alloc] initWithLibrary:*library kernel:found] : nil;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  id<MTLFunction> function = [self newFunctionWithName:name];
  if (!function) fail(error, "no function named " + text(name));
  return function;
}
@end

@interface SimPipeline : SimLoaded <MTLComputePipelineState> {
 @public
  bool whole_simdgroups;  // the descriptor promised threadgroups of a multiple of 32 threads
  NSUInteger max_threads;
  std::string* label_text;  // its label, as every dispatch reports it
}
@end

@implementation SimPipeline
+ (const char*)kind {
  return "MTLComputePipelineState";
}
- (id)initWithLibrary:(const std::shared_ptr<metal_sim::Library>&)from kernel:(const metal_sim::Kernel*)found {
  if ((self = [super initWithLibrary:from kernel:found])) label_text = new std::string;
  return self;
}
- (void)dealloc {
  delete label_text;
  [super dealloc];
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return max_threads;
}
- (NSUInteger)threadExecutionWidth {
  return metal_sim::simdgroup_width;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return kernel->static_threadgroup_bytes;
}
@end

// ---- the encoder ----

namespace {

struct Slot {
  metal_sim::Argument argument;
  id<MTLBuffer> buffer = nil;
  uint64_t pipeline = 0;  // the number of the last setComputePipelineState: before it
};

struct EncoderState {
  SimPipeline* pipeline = nil;
  uint64_t pipeline_count = 0;
  std::array<Slot, metal_sim::buffer_slots> slots;
  std::array<size_t, metal_sim::buffer_slots> threadgroup_lengths{};
  std::array<uint64_t, metal_sim::buffer_slots> threadgroup_pipelines{};
  int debug_groups = 0;
  bool ordered = false;  // nothing was dispatched since the last barrier
};

[[noreturn]] void broken(const char* rule, const std::string& message) { throw Violation(rule, message); }

Slot& slot_at(EncoderState& state, NSUInteger index) {
  if (index >= state.slots.size())
    broken("argument", "buffer index " + std::to_string(index) + "; Metal has 31 of them");
  return state.slots[index];
}

void bind(EncoderState& state, id<MTLBuffer> buffer, NSUInteger offset, NSUInteger index) {
  Slot& slot = slot_at(state, index);
  metal_sim::Argument argument{.kind = metal_sim::Argument::Kind::buffer, .offset = offset};
  if (buffer) {
    const auto* memory = metal_sim::find_memory((const void*)buffer);
    if (!memory) broken("argument", "setBuffer with a pointer that is not a live MTLBuffer; is its tensor on the CPU?");
    if (offset >= memory->length)
      broken("argument", "setBuffer at offset " + std::to_string(offset) + " of a buffer of " +
                             std::to_string(memory->length) + " bytes; the offset must be less than the length");
    argument.data = reinterpret_cast<std::byte*>(memory->bytes);
    argument.length = memory->length;
  }
  [buffer retain];
  [slot.buffer release];
  slot = {.argument = std::move(argument), .buffer = buffer, .pipeline = state.pipeline_count};
}

std::string at_index(const metal_sim::Parameter& parameter) {
  return "argument `" + parameter.name + "` at index " + std::to_string(parameter.index);
}

// In Metal, bindings of an earlier dispatch remain; a kernel that uses them works by accident.
void check_bound_for_this_pipeline(const EncoderState& state) {
  for (const auto& parameter : state.pipeline->kernel->parameters) {
    const bool dynamic = parameter.space == metal_sim::Space::threadgroup;
    const uint64_t when =
        dynamic ? state.threadgroup_pipelines[parameter.index] : state.slots[parameter.index].pipeline;
    if (when == state.pipeline_count) continue;
    const std::string what = at_index(parameter) + " of kernel " + state.pipeline->kernel->name;
    if (when == 0) broken("unbound", what + " was never bound");
    broken("stale",
           what + " was bound before this kernel's setComputePipelineState: and is left from another dispatch");
  }
}

void check_sizes(const EncoderState& state, const metal_sim::Size& grid, const metal_sim::Size& threads) {
  const size_t count = threads.x * threads.y * threads.z;
  if (!grid.x || !grid.y || !grid.z || !count) broken("launch", "a dispatch with a size of zero");
  if (count > state.pipeline->max_threads)
    broken("launch", std::to_string(count) + " threads per threadgroup; the pipeline allows " +
                         std::to_string(state.pipeline->max_threads));
  if (state.pipeline->whole_simdgroups && count % metal_sim::simdgroup_width)
    broken("launch", "the pipeline was promised threadgroups of a multiple of 32 threads");
  size_t bytes = state.pipeline->kernel->static_threadgroup_bytes;
  for (size_t length : state.threadgroup_lengths) bytes += length;
  if (bytes > metal_sim::max_threadgroup_bytes)
    broken("threadgroup_memory", std::to_string(bytes) + " bytes of threadgroup memory; 32768 are allowed");
}

std::vector<metal_sim::Bound> bound_arguments(const EncoderState& state) {
  std::vector<metal_sim::Bound> all;
  all.reserve(state.pipeline->kernel->parameters.size());
  for (const auto& parameter : state.pipeline->kernel->parameters) {
    if (parameter.space == metal_sim::Space::threadgroup) continue;
    const auto& argument = state.slots[parameter.index].argument;
    all.push_back({parameter.index, argument.data, argument.offset, argument.length, argument.bytes});
  }
  return all;
}

// From the bound offset to the end of each buffer; from the lowest offset if a buffer is bound more than once.
size_t bound_bytes(const std::vector<metal_sim::Bound>& arguments) {
  size_t total = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    size_t first = arguments[i].offset, again = 0;
    for (size_t j = 0; j < arguments.size(); ++j) {
      if (arguments[j].contents != arguments[i].contents) continue;
      first = std::min(first, arguments[j].offset);
      again += j < i;
    }
    if (arguments[i].contents && !again) total += arguments[i].length - first;
  }
  return total;
}

std::optional<metal_sim::Costs> run_kernel(EncoderState& state, metal_sim::Size grid, metal_sim::Size threads,
                                           bool exact_threads) {
  std::array<metal_sim::Argument, metal_sim::buffer_slots> arguments;
  for (const auto& parameter : state.pipeline->kernel->parameters)
    if (parameter.space != metal_sim::Space::threadgroup)
      arguments[parameter.index] = state.slots[parameter.index].argument;
  const auto& kernel = *state.pipeline->kernel;
  return metal_sim::dispatch(kernel, arguments, state.threadgroup_lengths, grid, threads, exact_threads);
}

// PyTorch may have dispatched before, so the first dispatch of an encoder needs a barrier, too.
void check_order(EncoderState& state) {
  if (metal_sim::options().concurrent && !state.ordered)
    broken("barrier", "a dispatch on a concurrent encoder with no memoryBarrierWithScope: since the one before");
  state.ordered = false;
}

// Buffers over the caller's pages: these must still be there, and nothing may write to read-only ones.
void check_pages(const EncoderState& state) {
  for (const auto& parameter : state.pipeline->kernel->parameters) {
    if (parameter.space == metal_sim::Space::threadgroup || !state.slots[parameter.index].buffer) continue;
    const auto* memory = metal_sim::find_memory((const void*)state.slots[parameter.index].buffer);
    if (!memory || !memory->is_given) continue;
    const std::string what = at_index(parameter) + " of kernel " + state.pipeline->kernel->name;
    if (!metal_sim::is_mapped(*memory)) broken("unmapped", what + " is over pages that are not mapped any more");
    if (memory->is_read_only && parameter.space == metal_sim::Space::device && !parameter.is_const)
      broken("read_only", what + " can be written, and is over pages that are read-only");
  }
}

void run(EncoderState& state, metal_sim::Size grid, metal_sim::Size threads, bool exact_threads) {
  if (!state.pipeline) broken("pipeline", "a dispatch without setComputePipelineState:");
  check_order(state);
  check_bound_for_this_pipeline(state);
  check_sizes(state, grid, threads);
  check_pages(state);

  std::optional<metal_sim::Costs> costs;
  const auto start = std::chrono::steady_clock::now();
  if (!metal_sim::options().host_only) costs = run_kernel(state, grid, threads, exact_threads);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  auto arguments = bound_arguments(state);
  const size_t buffer_bytes = bound_bytes(arguments);
  size_t constant_bytes = 0, threadgroup_bytes = state.pipeline->kernel->static_threadgroup_bytes;
  for (const auto& argument : arguments) constant_bytes += argument.bytes.size();
  for (size_t length : state.threadgroup_lengths) threadgroup_bytes += length;
  metal_sim::count_dispatch({state.pipeline->kernel->name, *state.pipeline->label_text, grid, threads, exact_threads,
                             threadgroup_bytes, buffer_bytes, constant_bytes, seconds, costs, std::move(arguments)});
}

metal_sim::Size size_of(MTLSize size) { return {size.width, size.height, size.depth}; }

}  // namespace

@interface SimEncoder : SimObject <MTLComputeCommandEncoder> {
 @public
  EncoderState* state;
  uint64_t block;  // the queue block in which it was last handed out
  bool ended;
}
- (EncoderState&)usable;
@end

@implementation SimEncoder
+ (const char*)kind {
  return "MTLComputeCommandEncoder";
}
- (id)init {
  if ((self = [super init])) state = new EncoderState;
  return self;
}
- (void)dealloc {
  for (Slot& slot : state->slots) [slot.buffer release];
  [state->pipeline release];
  delete state;
  [super dealloc];
}
// At the start of each message that an op sends.
- (EncoderState&)usable {
  metal_sim::throw_noted_fault();
  if (!metal_sim::on_queue()) broken("encoder", "the encoder was used off the stream's queue");
  if (block != metal_sim::queue_block())
    broken("encoder", "the encoder was used outside of the block in which commandEncoder() gave it");
  if (ended) broken("encoder", "the encoder was used after a commit, which has ended it");
  ++metal_sim::counters().messages;
  return *state;
}
- (MTLDispatchType)dispatchType {
  [self usable];
  return metal_sim::options().concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
}
- (void)endEncoding {
  broken("encoder", "an op ended the stream's encoder; it belongs to the stream");
}
- (void)insertDebugSignpost:(NSString*)string {
  [self usable];
}
- (void)pushDebugGroup:(NSString*)string {
  ++[self usable].debug_groups;
}
- (void)popDebugGroup {
  if (--[self usable].debug_groups < 0) broken("encoder", "popDebugGroup without pushDebugGroup:");
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  EncoderState& current = [self usable];
  if (!pipeline) broken("pipeline", "setComputePipelineState: with nil");
  [pipeline retain];
  [current.pipeline release];
  current.pipeline = (SimPipeline*)pipeline;
  ++current.pipeline_count;
  current.threadgroup_lengths = {};
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  EncoderState& current = [self usable];
  if (length == 0 || length > 4096)
    broken("argument", "setBytes of " + std::to_string(length) + " bytes; Metal takes 1 to 4096");
  if (!bytes) broken("argument", "setBytes with a null pointer");
  Slot& slot = slot_at(current, index);
  [slot.buffer release];
  auto* first = static_cast<const std::byte*>(bytes);
  slot = {.argument = {.kind = metal_sim::Argument::Kind::bytes, .bytes = {first, first + length}},
          .pipeline = current.pipeline_count};
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  bind([self usable], buffer, offset, index);
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  EncoderState& current = [self usable];
  id<MTLBuffer> buffer = slot_at(current, index).buffer;
  if (!buffer) broken("argument", "setBufferOffset: at an index without a buffer");
  bind(current, buffer, offset, index);
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers offsets:(const NSUInteger[])offsets withRange:(NSRange)range {
  EncoderState& current = [self usable];
  for (NSUInteger i = 0; i < range.length; ++i) bind(current, buffers[i], offsets[i], range.location + i);
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  EncoderState& current = [self usable];
  slot_at(current, index);
  if (length == 0 || length % 16)
    broken("threadgroup_memory",
           "a threadgroup length of " + std::to_string(length) + "; Metal wants a multiple of 16");
  current.threadgroup_lengths[index] = length;
  current.threadgroup_pipelines[index] = current.pipeline_count;
}
- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
  metal_sim::Size size = size_of(grid);
  if (size.x) size.x += metal_sim::options().more_threadgroups;
  run([self usable], size, size_of(threads), /*exact_threads=*/false);
}
- (void)dispatchThreads:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
  run([self usable], size_of(grid), size_of(threads), /*exact_threads=*/true);
}
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  [self usable];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  EncoderState& current = [self usable];
  if (scope & MTLBarrierScopeBuffers) current.ordered = true;
}
@end

// ---- command buffer and queues ----

namespace metal_sim {
namespace {
std::vector<MTLCommandBufferHandler>& handlers() {  // of the command buffer to be committed; guarded by the queue
  static auto* all = new std::vector<MTLCommandBufferHandler>;
  return *all;
}
}  // namespace
}  // namespace metal_sim

static bool is_committed(MPSCommandBuffer* buffer);

@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  broken("encoder", "an op made its own command buffer; the stream's is the only one that PyTorch's order covers");
}
- (id<MTLCommandBuffer>)commandBuffer {
  return self;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return self;
}
- (id<MTLDevice>)device {
  return shared_device();
}
- (id<MTLCommandQueue>)commandQueue {
  return (id<MTLCommandQueue>)metal_sim::command_queue_object();
}
- (NSString*)label {
  return nil;
}
- (void)setLabel:(NSString*)label {
}
- (MTLCommandBufferStatus)status {
  return MTLCommandBufferStatusNotEnqueued;
}
- (NSError*)error {
  return nil;
}
// Handlers belong to the next commit, as in Metal.
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  if (!metal_sim::on_queue()) broken("encoder", "addCompletedHandler: called off the stream's queue");
  if (is_committed(self)) broken("encoder", "addCompletedHandler: of a command buffer that is committed");
  metal_sim::handlers().push_back(Block_copy(block));
}
- (void)commit {
  broken("encoder", "an op committed the stream's command buffer itself; MPSStream::synchronize() is there for it");
}
- (void)commitAndContinue {
  broken("encoder", "an op committed the stream's command buffer itself; MPSStream::synchronize() is there for it");
}
- (void)waitUntilCompleted {
  broken("encoder", "an op waited for the device");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  broken("encoder",
         "an op opened its own encoder; on macOS: \"A command encoder is already encoding to this command buffer\"");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  return [self computeCommandEncoder];
}
@end

// A completed command buffer, the argument of handlers.
@interface SimCompletedBuffer : MPSCommandBuffer {
 @public
  NSError* failure;
}
@end
@implementation SimCompletedBuffer
- (void)dealloc {
  [failure release];
  [super dealloc];
}
- (MTLCommandBufferStatus)status {
  return failure ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
}
- (NSError*)error {
  return failure;
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  broken("encoder", "addCompletedHandler: of a command buffer that is committed");
}
@end

@interface SimSerialQueue : NSObject <OS_dispatch_queue>
@end
@implementation SimSerialQueue
@end

@interface SimCommandQueue : SimObject <MTLCommandQueue>
@end
@implementation SimCommandQueue
+ (const char*)kind {
  return "MTLCommandQueue";
}
- (id<MTLCommandBuffer>)commandBuffer {
  broken("encoder", "an op made its own command buffer; the stream's is the only one that PyTorch's order covers");
}
@end

// The encoder that PyTorch returns during a capture (PR 189019): an object of another class, which records four calls
// and forwards all others. Work that is encoded by other calls is missing from the recording.
@interface SimRecordingEncoder : NSObject {
 @public
  SimEncoder* target;
}
@end
#define SIM_UNRECORDED(...)                                                                   \
  -(void)__VA_ARGS__ {                                                                        \
    broken("capture", "an op encodes by a call that PyTorch does not record: " #__VA_ARGS__); \
  }
@implementation SimRecordingEncoder
- (void)dealloc {
  [target release];
  [super dealloc];
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  [target setComputePipelineState:pipeline];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  [target setBytes:bytes length:length atIndex:index];
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [target setBuffer:buffer offset:offset atIndex:index];
}
- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
  [target dispatchThreadgroups:grid threadsPerThreadgroup:threads];
}
SIM_UNRECORDED(dispatchThreads : (MTLSize)grid threadsPerThreadgroup : (MTLSize)threads)
SIM_UNRECORDED(setBufferOffset : (NSUInteger)offset atIndex : (NSUInteger)index)
SIM_UNRECORDED(setBuffers : (const id<MTLBuffer>[])buffers offsets : (const NSUInteger[])offsets withRange : (NSRange)
                   range)
SIM_UNRECORDED(setThreadgroupMemoryLength : (NSUInteger)length atIndex : (NSUInteger)index)
- (NSMethodSignature*)methodSignatureForSelector:(SEL)selector {
  return [target methodSignatureForSelector:selector];
}
- (void)forwardInvocation:(NSInvocation*)invocation {
  [invocation invokeWithTarget:target];
}
@end

namespace metal_sim {
namespace {
// All three are guarded by the queue.
SimEncoder* encoder = nil;
SimRecordingEncoder* recording_encoder = nil;
MPSCommandBuffer* command_buffer = nil;
}  // namespace

void* encoder_of_block() {
  if (!encoder) encoder = [SimEncoder new];
  encoder->block = queue_block();
  if (!options().records) return encoder;
  if (!recording_encoder) {
    recording_encoder = [SimRecordingEncoder new];
    recording_encoder->target = [encoder retain];
  }
  return recording_encoder;
}

void end_encoder() {
  if (encoder) encoder->ended = true;
  [encoder release];
  [recording_encoder release];
  encoder = nil;
  recording_encoder = nil;
}

void commit() {
  [[encoder retain] autorelease];  // so that its later use is detected
  [[recording_encoder retain] autorelease];
  end_encoder();
  complete();
  if (options().flushes) command_buffer = nil;  // never released, as in PyTorch
  std::lock_guard lock(counters_mutex());
  ++counters().commits;
}

void complete() {
  const auto waiting = std::exchange(handlers(), {});
  for (MTLCommandBufferHandler handler : waiting) {
    call_on_metals_thread([&] {
      auto* done = [[SimCompletedBuffer new] autorelease];
      if (!options().commit_error.empty()) {
        fail(&done->failure, options().commit_error);
        [done->failure retain];
      }
      handler(done);
    });
    Block_release(handler);
  }
}

void* queue_object() {
  static auto* queue = [SimSerialQueue new];
  return queue;
}

void* command_queue_object() {
  static auto* queue = [SimCommandQueue new];
  return queue;
}

void* command_buffer_object() {
  if (!command_buffer) command_buffer = [MPSCommandBuffer new];
  return command_buffer;
}
}  // namespace metal_sim

static bool is_committed(MPSCommandBuffer* buffer) { return buffer != metal_sim::command_buffer_object(); }

// ---- the device ----

@interface SimDevice : NSObject <MTLDevice> {
  BOOL _concurrently;
}
@end

@implementation SimDevice
@synthesize shouldMaximizeConcurrentCompilation = _concurrently;
- (NSString*)name {
  return [NSString stringWithUTF8String:metal_sim::options().gpu.c_str()];
}
- (uint64_t)registryID {
  return 1;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(metal_sim::max_threads_per_threadgroup, metal_sim::max_threads_per_threadgroup,
                     metal_sim::max_threads_per_threadgroup);
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return metal_sim::options().working_set;
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return metal_sim::max_threadgroup_bytes;
}
- (NSUInteger)maxBufferLength {
  return metal_sim::options().max_buffer;
}
- (NSUInteger)currentAllocatedSize {
  return metal_sim::allocated_bytes() + metal_sim::given_bytes();
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  if (family == MTLGPUFamilyMetal4) return metal_sim::options().macos.first >= 26;
  return family <= metal_sim::options().family || family == MTLGPUFamilyMac2 || family == MTLGPUFamilyCommon3 ||
         family == MTLGPUFamilyMetal3;
}
- (id<MTLCommandQueue>)newCommandQueue {
  broken("encoder", "an op made its own command queue; PyTorch's order does not cover it");
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  return [[SimBuffer alloc] initWithLength:length ofTensor:false];
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes length:(NSUInteger)length options:(MTLResourceOptions)options {
  id<MTLBuffer> buffer = [self newBufferWithLength:length options:options];
  std::memcpy([buffer contents], bytes, length);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pages
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  if (!metal_sim::options().takes_pages) return nil;
  return [[SimPagesBuffer alloc] initWithPages:pages length:length deallocator:deallocator];
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor error:(NSError**)error {
  metal_sim::must_be_macos_15("newResidencySetWithDescriptor:error:", "MTLDevice");
  return [SimResidencySet new];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  if (!source) broken("argument", "newLibraryWithSource: with nil; is the source ASCII?");
  metal_sim::CompileOptions compile;
  const NSUInteger version = options ? options.languageVersion : NSUInteger(MTLLanguageVersion3_1);
  compile.metal_version = int(version >> 16) * 100 + int(version & 0xFFFF) * 10;
  compile.fast_math = options ? options.mathMode == MTLMathModeFast : true;
  for (NSString* name in options.preprocessorMacros)
    compile.macros[text(name)] = text([[options.preprocessorMacros objectForKey:name] description]);
  const long newest = metal_sim::options().macos.first;
  if (compile.metal_version > (newest >= 26 ? 400 : newest >= 15 ? 320 : 310)) {
    fail(error, "this macOS does not know Metal " + std::to_string(compile.metal_version));
    return nil;
  }
  try {
    auto library = metal_sim::Library::compile(text(source), compile);
    const bool precise = options && options.mathFloatingPointFunctions == MTLMathFloatingPointFunctionsPrecise;
    const bool safe = options && options.mathMode == MTLMathModeSafe;
    metal_sim::count_library({compile.metal_version, safe, precise, bool(_concurrently)});
    return [[SimLibrary alloc] initWithLibrary:library kernel:nullptr];
  } catch (const metal_sim::CompileError& problem) {
    fail(error, problem.what());
    return nil;
  }
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  if (!function) broken("argument", "a pipeline from a nil function");
  SimFunction* from = (SimFunction*)function;
  SimPipeline* pipeline = [[SimPipeline alloc] initWithLibrary:*from->library kernel:from->kernel];
  pipeline->max_threads = metal_sim::max_threads_per_threadgroup;
  return pipeline;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLAutoreleasedComputePipelineReflection*)reflection
                                                               error:(NSError**)error {
  SimPipeline* pipeline = (SimPipeline*)[self newComputePipelineStateWithFunction:descriptor.computeFunction
                                                                            error:error];
  [pipeline setLabel:descriptor.label];
  *pipeline->label_text = text(descriptor.label);
  // As in Metal, the descriptor's value becomes the limit.
  if (descriptor.maxTotalThreadsPerThreadgroup) pipeline->max_threads = descriptor.maxTotalThreadsPerThreadgroup;
  pipeline->whole_simdgroups = descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth;
  return pipeline;
}
@end

static id<MTLDevice> shared_device() {
  static SimDevice* device = [SimDevice new];
  return device;
}

id<MTLDevice> MTLCreateSystemDefaultDevice() { return [shared_device() retain]; }
NSArray<id<MTLDevice>>* MTLCopyAllDevices() { return [[NSArray alloc] initWithObjects:shared_device(), nil]; }

// ---- Foundation ----

@implementation NSProcessInfo (MacOSVersion)
- (NSOperatingSystemVersion)operatingSystemVersion {
  const auto [major, minor] = metal_sim::options().macos;
  return {metal_sim::options().for_older_sdk && major >= 26 ? 16 : major, minor, 0};
}
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)version {
  const NSOperatingSystemVersion own = [self operatingSystemVersion];
  return std::pair(own.majorVersion, own.minorVersion) >= std::pair(version.majorVersion, version.minorVersion);
}
@end

// The kernel's release: Darwin 23 is macOS 14, 24 is 15, 25 is 26, and 27 is 27.
extern "C" int sysctlbyname(const char* name, void* value, size_t* size, void* next, size_t) {
  if (std::strcmp(name, "kern.osrelease") || !value || next)
    throw Violation("unsupported", std::string("sysctlbyname of ") + name + " is not simulated");
  const auto [major, minor] = metal_sim::options().macos;
  const long darwin = major < 26 ? major + 9 : major == 26 ? 25 : major;
  const std::string text = std::to_string(darwin) + "." + std::to_string(minor) + ".0";
  if (*size < text.size() + 1) return -1;
  *size = text.size() + 1;
  std::memcpy(value, text.c_str(), *size);
  return 0;
}

extern "C" int metal_sim_fstatfs(int, struct statfs* found) {
  found->f_flags = metal_sim::options().local_volumes ? MNT_LOCAL : 0;
  return 0;
}

// GNUstep logs objects that are autoreleased without a pool; on macOS they would leak silently.
static void take_log(NSString* message) {
  if ([message rangeOfString:@"autorelease called without pool"].location != NSNotFound)
    metal_sim::note_fault("autorelease", text(message));
  else
    std::fprintf(stderr, "%s\n", message.UTF8String);
}

__attribute__((constructor)) static void install_log_handler() { _NSLog_printf_handler = &take_log; }
