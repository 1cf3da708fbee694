// Runs Metal compute kernels on the CPU: takes MSL source, returns results or the rule that was broken.
// Plain C++20, independent of PyTorch, Objective-C and the kernels that it runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace metal_sim {

inline constexpr size_t buffer_slots = 31;
inline constexpr size_t max_threads_per_threadgroup = 1024;
inline constexpr size_t max_threadgroup_bytes = 32768;
inline constexpr size_t simdgroup_width = 32;

// A rule of Metal that a dispatch broke. `rule` is its short name: bounds, alignment, race, order, uninitialized,
// barrier, simdgroup, unbound, argument, alias, threadgroup_memory, launch, stack, arithmetic, time.
struct Violation : std::runtime_error {
  Violation(std::string rule_name, const std::string& message)
      : std::runtime_error(rule_name + ": " + message), rule(std::move(rule_name)) {}
  std::string rule;
};

// The source does not compile; what() is the compiler's message.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Size {
  uint64_t x = 1, y = 1, z = 1;
};

// The binding of one buffer index.
struct Argument {
  enum class Kind { unbound, buffer, bytes } kind = Kind::unbound;
  std::byte* data = nullptr;     // buffer: start of the whole buffer
  size_t length = 0;             // buffer: length of the whole buffer
  size_t offset = 0;             // buffer: where the kernel's pointer starts
  std::vector<std::byte> bytes;  // bytes: a copy made by setBytes
};

enum class Space { device, constant, threadgroup };

// One [[buffer(n)]] or [[threadgroup(n)]] parameter of a kernel.
struct Parameter {
  std::string name;
  Space space = Space::device;
  uint32_t index = 0;
  bool is_const = false;      // the kernel cannot write through it
  bool is_reference = false;  // one object, not an array
  size_t element_size = 0;
  size_t element_alignment = 0;
};

class Library;

struct Kernel {
  std::string name;  // host_name, or the function's own name
  std::vector<Parameter> parameters;
  size_t static_threadgroup_bytes = 0;
  std::weak_ptr<const Library> library;
  void (*entry)() = nullptr;
  size_t max_threads = max_threads_per_threadgroup;  // less if the kernel says [[max_total_threads_per_threadgroup]]
  size_t static_variables = 0;
  const void* info = nullptr;  // abi::KernelInfo, in the compiled library
};

struct CompileOptions {
  int metal_version = 310;  // __METAL_VERSION__: 310 or 400
  bool fast_math = false;   // the simulator always computes as safe maths; fast maths only defines __FAST_MATH__
  std::map<std::string, std::string> macros;
};

class Library {
 public:
  // Translates, compiles (or takes from the cache on disk) and loads. Throws CompileError.
  static std::shared_ptr<Library> compile(const std::string& source, const CompileOptions& options = {});
  ~Library();
  const Kernel* find(const std::string& name) const;  // nullptr if absent; valid as long as the library
  std::vector<std::string> names() const;

 private:
  friend struct Run;  // one dispatch
  Library() = default;
  void* handle_ = nullptr;
  void* state_ = nullptr;  // abi::State, in the compiled library
  std::string path_;
  std::map<std::string, Kernel> kernels_;
};

// An order in which threadgroups, simdgroups and threads run.
struct Order {
  enum class Kind { forward, backward, random } kind = Kind::forward;
  uint64_t seed = 0;
};

struct Settings {
  std::vector<Order> orders;     // every dispatch runs once in each; env METAL_SIM_ORDERS="forward,backward,random:1"
  double seconds = 60;           // of CPU time for one threadgroup; env METAL_SIM_SECONDS
  size_t last_threadgroups = 0;  // run only so many, the last along x, of a grid that is too large; 0: all
  size_t sample = 0;             // run only so many threadgroups of a larger grid, evenly spread; 0: all
  bool costs = false;            // count what a dispatch does
  bool races = true;             // look for data races; env METAL_SIM_RACES=0 turns it off
  std::string arithmetic;        // permitted differences of GPUs, see README.md; only from env METAL_SIM_ARITHMETIC
  std::string home;              // folder of translate.py and shim/; env METAL_SIM_HOME, else the one of this file
  std::string cache;             // compiled shaders; env METAL_SIM_CACHE, else build/shaders next to <home>
};
Settings& settings();  // read and changed between dispatches only
inline bool has_arithmetic(const char* what) { return settings().arithmetic.find(what) != std::string::npos; }

// Counts over the threadgroups that ran, in the first order. Bytes are counted per thread; an atomic that writes counts
// as a load and a store. Operations of a simdgroup or a threadgroup count once.
struct Costs {
  uint64_t device_loaded = 0, device_stored = 0, constant_loaded = 0;
  uint64_t threadgroup_loaded = 0, threadgroup_stored = 0;
  uint64_t matrix_multiplications = 0;  // of 8x8 matrices, by a simdgroup
  uint64_t simd_functions = 0;          // sums, scans, shuffles, votes; quad functions too
  uint64_t simdgroup_barriers = 0, threadgroup_barriers = 0;
  uint64_t threadgroups = 0, threadgroups_run = 0;  // of the grid; fewer were run if settings() limit them
};
std::string json(const Costs& costs);

// Runs the kernel now, once in every order of settings().orders, and leaves its results in the buffers.
// Throws Violation; the buffers' contents are then unspecified. One dispatch runs at a time in a process.
// grid: threads when exact_threads (dispatchThreads), else threadgroups (dispatchThreadgroups).
// Returns costs if settings().costs is set.
std::optional<Costs> dispatch(const Kernel& kernel, const std::array<Argument, buffer_slots>& buffers,
                              const std::array<size_t, buffer_slots>& threadgroup_lengths, Size grid,
                              Size threads_per_threadgroup, bool exact_threads);

}  // namespace metal_sim
