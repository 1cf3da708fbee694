// One dispatch: checks the bindings, runs every order, compares the results.
#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <sstream>

#include "scheduler.h"
#include "shim/abi.h"

namespace metal_sim {
namespace {

std::string variable(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::vector<Order> parse_orders(const std::string& text) {
  std::vector<Order> orders;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    if (word == "forward")
      orders.push_back({Order::Kind::forward});
    else if (word == "backward")
      orders.push_back({Order::Kind::backward});
    else if (word.rfind("random:", 0) == 0)
      orders.push_back({Order::Kind::random, std::stoull(word.substr(7))});
    else
      throw std::runtime_error("METAL_SIM_ORDERS: '" + word + "' is not forward, backward or random:SEED");
  }
  if (orders.empty()) throw std::runtime_error("METAL_SIM_ORDERS names no order");
  return orders;
}

std::string order_name(const Order& order) {
  switch (order.kind) {
    case Order::Kind::forward:
      return "forward";
    case Order::Kind::backward:
      return "backward";
    case Order::Kind::random:
      break;
  }
  return "random:" + std::to_string(order.seed);
}

// The command that repeats a violation. pytest sets an environment variable to the running test.
std::string again(const std::string& orders) {
  std::string test = variable("PYTEST_CURRENT_TEST", "");
  test = test.substr(0, test.rfind(" ("));  // without "(call)"
  std::string command = test.empty() ? "<the same command>" : "python -m pytest \"" + test + "\"";
  return "\nto repeat it: METAL_SIM_ORDERS=" + orders + " " + command;
}

Settings initial_settings() {
  Settings s;
  s.orders = parse_orders(variable("METAL_SIM_ORDERS", "forward,backward,random:1"));
  s.seconds = std::stod(variable("METAL_SIM_SECONDS", "60"));
  s.races = variable("METAL_SIM_RACES", "1") != "0";
  s.arithmetic = variable("METAL_SIM_ARITHMETIC", "");
  s.home = variable("METAL_SIM_HOME", std::filesystem::absolute(__FILE__).parent_path().string());
  s.cache = variable("METAL_SIM_CACHE", (std::filesystem::path(s.home) / "../build/shaders").lexically_normal());
  return s;
}

std::string str(uint64_t n) { return std::to_string(n); }

uint64_t count(const uint32_t* size) { return uint64_t(size[0]) * size[1] * size[2]; }

// Shadow memory of device buffers. It is never cleared: epochs distinguish old entries from new ones.
struct DeviceShadow {
  abi::Cell* cells = nullptr;
  size_t capacity = 0;

  abi::Cell* reserve(size_t wanted) {
    if (wanted <= capacity) return cells;
    if (cells) munmap(cells, capacity * sizeof(abi::Cell));
    capacity = wanted;
    void* memory = mmap(nullptr, capacity * sizeof(abi::Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return cells = static_cast<abi::Cell*>(memory);
  }
  void trim() {
    constexpr size_t keep = (64 << 20) / sizeof(abi::Cell);
    if (capacity <= keep) return;
    munmap(cells, capacity * sizeof(abi::Cell));
    cells = nullptr;
    capacity = 0;
  }
};
DeviceShadow device_shadow;
uint32_t device_epoch = 1, threadgroup_epoch = 1;
std::mutex one_dispatch;

}  // namespace

Settings& settings() {
  static Settings s = initial_settings();
  return s;
}

// The state of the current dispatch.
struct Run {
  const Kernel& kernel;
  const std::array<Argument, buffer_slots>& buffers;
  const std::array<size_t, buffer_slots>& lengths;
  Size grid, threads;
  bool exact;
  std::shared_ptr<const Library> library;
  abi::State* state{};
  std::array<uint64_t, 3> groups{};

  // Memory that the kernel may write, and its initial content.
  struct Writable {
    const Parameter* parameter;
    std::byte* begin;
    size_t size;
    std::vector<std::byte> before, first;
  };
  std::vector<Writable> writable{};

  // Memory whose accesses are counted, and the counters; the most accessed memory comes first.
  struct Counted {
    uint64_t begin, size;
    uint64_t *loaded, *stored;
  };
  std::vector<Counted> counted{};
  uint64_t of_threads = 0;  // bytes in the threads' own memory
  Costs costs{};

  static Run* current;

  ~Run() {
    if (state) state->count_access = nullptr;  // the library's code is also called outside of dispatches
  }

  [[noreturn]] void broken(const char* rule, const std::string& message) const {
    throw Violation(rule, "kernel '" + kernel.name + "': " + message);
  }

  void prepare();
  void check_launch();
  void check_argument(const Parameter& p);
  void check_aliases();
  void fill_regions();
  void fill_shadow();
  void fill_counted();
  void count_access(uint64_t address, uint64_t bytes, bool is_write, bool is_atomic);
  std::vector<uint64_t> chosen() const;
  void run_all();
  void run_once(const Order& order);
  void run_group(uint64_t group, const Order& order, Random& random);
  void compare(const Order& order);
  std::string described(uint64_t pointer) const;
  std::string place(const Failure& failure) const;
  std::string source_line(const void* where) const;
  const Parameter* parameter_of(uint32_t tag) const;
};
Run* Run::current = nullptr;

namespace {

std::string argument_name(const Parameter& p) {
  return "'" + p.name + "' [[" + (p.space == Space::threadgroup ? "threadgroup" : "buffer") + "(" + str(p.index) +
         ")]]";
}

std::byte* start_of(const Argument& a) {
  return a.kind == Argument::Kind::bytes ? const_cast<std::byte*>(a.bytes.data()) : a.data + a.offset;
}
size_t bytes_of(const Argument& a) {
  if (a.kind == Argument::Kind::bytes) return a.bytes.size();
  return a.kind == Argument::Kind::buffer ? a.length - a.offset : 0;
}

// --- called by a kernel that breaks a rule; each aborts the threadgroup

void bad_access(uint64_t pointer, uint64_t bytes, uint64_t alignment, const void* where) {
  uint32_t tag = uint32_t(pointer >> abi::tag_shift);
  const abi::Region& region = Run::current->state->regions[tag];
  uint64_t address = pointer & abi::address_mask;
  int64_t offset = int64_t(address - region.begin);
  bool inside = offset >= 0 && uint64_t(offset) + bytes <= region.size;
  std::string what =
      str(bytes) + " bytes at offset " + std::to_string(offset) + " of " + Run::current->described(pointer);
  const Parameter* p = Run::current->parameter_of(tag);
  if (inside) fail({"alignment", what + " need an alignment of " + str(alignment), where});
  if (p && p->space != Space::threadgroup && Run::current->buffers[p->index].kind == Argument::Kind::unbound)
    fail({"unbound", "nothing is bound at " + argument_name(*p), where});
  fail({"bounds", what + ", which has " + str(region.size) + " bytes", where});
}

void bad_sharing(abi::Race race, uint64_t address, uint64_t other, bool device, const void* where) {
  std::string what = device ? "device memory" : "threadgroup memory";
  const abi::State& state = *Run::current->state;
  for (uint32_t tag = 1; tag < state.region_count; ++tag)
    if (address - state.regions[tag].begin < state.regions[tag].size)
      what = "offset " + str(address - state.regions[tag].begin) + " of " +
             Run::current->described(uint64_t(tag) << abi::tag_shift);
  if (race == abi::Race::uninitialized)
    fail({"uninitialized", what + " is read, and nothing was written there", where});
  const char* verb = race == abi::Race::read_after_write ? " is read here and written by " : " is written here and ";
  const char* second = race == abi::Race::write_after_write  ? "written by "
                       : race == abi::Race::write_after_read ? "read by "
                                                             : "";
  bool other_group = device && abi::word_epoch(other) < state.device_start;
  std::string who = other_group ? "another threadgroup" : "thread " + str(abi::word_thread(other));
  fail({"race", what + verb + second + who + " with no barrier between", where});
}

void violation(const char* rule, const char* message, const void* where) { fail({rule, message, where}); }

void count_access(uint64_t address, uint64_t bytes, bool is_write, bool is_atomic) {
  Run::current->count_access(address, bytes, is_write, is_atomic);
}

}  // namespace

const Parameter* Run::parameter_of(uint32_t tag) const {
  for (const Parameter& p : kernel.parameters) {
    uint32_t first = p.space == Space::threadgroup ? abi::first_threadgroup_tag : abi::first_buffer_tag;
    if (tag == first + p.index) return &p;
  }
  return nullptr;
}

std::string Run::described(uint64_t pointer) const {
  uint32_t tag = uint32_t(pointer >> abi::tag_shift);
  if (const Parameter* p = parameter_of(tag)) return argument_name(*p);
  for (const auto* v = static_cast<const abi::KernelInfo*>(kernel.info)->statics; v; v = v->next)
    if (v->tag == tag && v->kernel == static_cast<const abi::KernelInfo*>(kernel.info)->identity)
      return "the kernel's threadgroup variable number " + str(v->ordinal + 1);
  return "unknown memory";
}

// Finds the source line of an address in the shader's debug information.
std::string Run::source_line(const void* where) const {
  if (!where) return "";
  std::string base, maps = "/proc/self/maps", line;
  uint64_t address = reinterpret_cast<uint64_t>(where) - 1, offset = 0;
  FILE* file = std::fopen(maps.c_str(), "r");
  char text[4096];
  while (file && std::fgets(text, sizeof(text), file))
    if (std::strstr(text, library->path_.c_str())) {
      offset = address - std::strtoull(text, nullptr, 16);
      break;
    }
  if (file) std::fclose(file);
  std::string tool = variable("METAL_SIM_SYMBOLIZER", "llvm-symbolizer-19");
  char command[4608];
  std::snprintf(command, sizeof(command), "%s --obj='%s' 0x%llx 2>/dev/null", tool.c_str(), library->path_.c_str(),
                static_cast<unsigned long long>(offset));
  FILE* pipe = popen(command, "r");
  while (pipe && std::fgets(text, sizeof(text), pipe))
    if (const char* at = std::strstr(text, "program_source:"); at && line.empty()) line = at;
  if (pipe) pclose(pipe);
  while (!line.empty() && line.back() == '\n') line.pop_back();
  return line;
}

std::string Run::place(const Failure& failure) const {
  std::string line = failure.line ? "program_source:" + str(failure.line) : source_line(failure.where);
  const uint32_t* group = state->threadgroup_in_grid;
  std::string out = " (";
  if (!line.empty()) out += line + ", ";
  out += "threadgroup " + str(group[0]) + "," + str(group[1]) + "," + str(group[2]);
  if (state->thread) out += ", thread " + str(state->thread->index);
  return out + ")";
}

void Run::check_launch() {
  uint64_t per_group = threads.x * threads.y * threads.z;
  if (!grid.x || !grid.y || !grid.z) broken("launch", "an empty grid");
  if (!per_group) broken("launch", "threadgroups without threads");
  if (per_group > kernel.max_threads)
    broken("launch", str(per_group) + " threads per threadgroup, " + str(kernel.max_threads) + " is the most");
  size_t total = kernel.static_threadgroup_bytes;
  for (size_t i = 0; i < buffer_slots; ++i) {
    if (lengths[i] % 16)
      broken("threadgroup_memory",
             "the length at index " + str(i) + ", " + str(lengths[i]) + ", is not a multiple of 16");
    total += lengths[i];
  }
  if (total > max_threadgroup_bytes)
    broken("threadgroup_memory",
           str(total) + " bytes of threadgroup memory, " + str(max_threadgroup_bytes) + " is the most");
  uint64_t size[3] = {grid.x, grid.y, grid.z}, each[3] = {threads.x, threads.y, threads.z};
  for (int i = 0; i < 3; ++i) {
    groups[i] = exact ? (size[i] + each[i] - 1) / each[i] : size[i];
    if (groups[i] * each[i] >> 32) broken("launch", "a grid of more than 2^32 threads in one dimension");
  }
}

void Run::check_argument(const Parameter& p) {
  if (p.space == Space::threadgroup) {
    if (lengths[p.index] < p.element_size) broken("unbound", "no threadgroup memory is set for " + argument_name(p));
    return;
  }
  const Argument& a = buffers[p.index];
  if (a.kind == Argument::Kind::unbound) broken("unbound", "nothing is bound at " + argument_name(p));
  if (a.kind == Argument::Kind::bytes && p.space == Space::device && !p.is_const)
    broken("argument", argument_name(p) + " is written, but setBytes bound it");
  if (a.kind == Argument::Kind::buffer && a.offset > a.length)
    broken("bounds",
           argument_name(p) + " is bound at offset " + str(a.offset) + " of a buffer of " + str(a.length) + " bytes");
  if (p.element_alignment && reinterpret_cast<uint64_t>(start_of(a)) % p.element_alignment)
    broken("alignment",
           argument_name(p) + " is bound at an address that is not a multiple of " + str(p.element_alignment));
  if (p.is_reference && bytes_of(a) < p.element_size)
    broken("argument",
           argument_name(p) + " needs " + str(p.element_size) + " bytes, " + str(bytes_of(a)) + " are bound");
}

// Kernels assume that different arguments are different memory.
void Run::check_aliases() {
  for (const Parameter& p : kernel.parameters)
    for (const Parameter& q : kernel.parameters) {
      if (&p == &q || p.space == Space::threadgroup || q.space == Space::threadgroup || p.is_const) continue;
      const Argument &a = buffers[p.index], &b = buffers[q.index];
      if (start_of(a) == start_of(b) && bytes_of(a) && bytes_of(b))
        broken("alias", argument_name(p) + ", which is written, and " + argument_name(q) + " are the same memory");
    }
}

void Run::fill_regions() {
  std::fill(std::begin(state->regions), std::end(state->regions), abi::Region{0, 0});
  state->regions[0] = {0, INT64_MAX};
  for (const Parameter& p : kernel.parameters)
    if (p.space != Space::threadgroup)
      state->regions[abi::first_buffer_tag + p.index] = {reinterpret_cast<uint64_t>(start_of(buffers[p.index])),
                                                         bytes_of(buffers[p.index])};
  uint64_t base = reinterpret_cast<uint64_t>(threadgroup_memory()), at = base + kernel.static_threadgroup_bytes;
  for (size_t i = 0; i < buffer_slots; ++i) {
    state->regions[abi::first_threadgroup_tag + i] = {at, lengths[i]};
    at += lengths[i];
  }
  state->threadgroup_begin = base;
  state->threadgroup_size = at - base;
  state->threadgroup_cells = threadgroup_cells();
  if (!settings().races) state->threadgroup_size = 0;
  const auto* info = static_cast<const abi::KernelInfo*>(kernel.info);
  for (const abi::StaticVariable* v = info->statics; v; v = v->next)
    if (v->kernel == info->identity) state->regions[v->tag] = {base + v->offset, v->size};
  state->region_count = abi::first_static_tag + info->static_count;
}

uint32_t granule_shift(const Parameter& p) {
  switch (p.element_size) {
    case 1:
      return 0;
    case 4:
      return 2;
    default:
      return p.element_size % 2 ? 0 : 1;
  }
}

// Shadow memory takes 16 bytes per element, so only the start of a huge output is checked for races.
size_t watched(const Run::Writable& w) {
  constexpr size_t most = size_t(32) << 20;  // cells
  return std::min(w.size, most << granule_shift(*w.parameter));
}

void Run::fill_shadow() {
  state->shadowed_count = 0;
  if (!settings().races) return;
  size_t wanted = 0;
  for (const Writable& w : writable) wanted += (watched(w) >> granule_shift(*w.parameter)) + 2;
  abi::Cell* cells = device_shadow.reserve(wanted);
  for (const Writable& w : writable) {
    uint32_t shift = granule_shift(*w.parameter);
    state->shadowed[state->shadowed_count++] = {reinterpret_cast<uint64_t>(w.begin), watched(w), cells, shift};
    cells += (watched(w) >> shift) + 2;
  }
}

// Nothing can be stored to constant memory.
void Run::fill_counted() {
  const uint64_t begin = reinterpret_cast<uint64_t>(threadgroup_memory());
  counted.push_back({begin, max_threadgroup_bytes, &costs.threadgroup_loaded, &costs.threadgroup_stored});
  counted.push_back({reinterpret_cast<uint64_t>(thread_memory()), thread_memory_bytes, &of_threads, &of_threads});
  for (const Parameter& p : kernel.parameters) {
    if (p.space == Space::threadgroup) continue;
    const Argument& a = buffers[p.index];
    uint64_t* loaded = p.space == Space::constant ? &costs.constant_loaded : &costs.device_loaded;
    counted.push_back({reinterpret_cast<uint64_t>(start_of(a)), bytes_of(a), loaded, &costs.device_stored});
  }
}

void Run::count_access(uint64_t address, uint64_t bytes, bool is_write, bool is_atomic) {
  for (const Counted& memory : counted) {
    if (address - memory.begin >= memory.size) continue;
    if (is_write) *memory.stored += bytes;
    if (!is_write || is_atomic) *memory.loaded += bytes;
    return;
  }
}

void Run::prepare() {
  state = static_cast<abi::State*>(library->state_);
  check_launch();
  for (const Parameter& p : kernel.parameters) check_argument(p);
  check_aliases();
  for (const Parameter& p : kernel.parameters)
    if (p.space == Space::device && !p.is_const)
      writable.push_back({&p, start_of(buffers[p.index]), bytes_of(buffers[p.index]), {}, {}});
  fill_regions();
  fill_shadow();
  if (settings().costs) fill_counted();
  uint64_t each[3] = {threads.x, threads.y, threads.z}, size[3] = {grid.x, grid.y, grid.z};
  for (int i = 0; i < 3; ++i) {
    state->dispatch_threads_per_threadgroup[i] = uint32_t(each[i]);
    state->threadgroups_per_grid[i] = uint32_t(groups[i]);
    state->threads_per_grid[i] = uint32_t(exact ? size[i] : size[i] * each[i]);
  }
  state->bad_access = bad_access;
  state->bad_sharing = bad_sharing;
  state->violation = violation;
}

void Run::run_group(uint64_t group, const Order& order, Random& random) {
  state->threadgroup_in_grid[0] = uint32_t(group % groups[0]);
  state->threadgroup_in_grid[1] = uint32_t(group / groups[0] % groups[1]);
  state->threadgroup_in_grid[2] = uint32_t(group / groups[0] / groups[1]);
  for (int i = 0; i < 3; ++i) {
    uint32_t full = state->dispatch_threads_per_threadgroup[i];
    state->threads_per_threadgroup[i] =
        std::min(full, state->threads_per_grid[i] - state->threadgroup_in_grid[i] * full);
  }
  state->thread_count = uint32_t(count(state->threads_per_threadgroup));
  state->device_start = ++state->device_epoch;
  state->threadgroup_start = ++state->threadgroup_epoch;
  // Poisons the memory, since old contents would look like results. All ones is NaN in every float type.
  uint64_t used = kernel.static_threadgroup_bytes + std::accumulate(lengths.begin(), lengths.end(), size_t(0));
  std::memset(threadgroup_memory(), 0xff, used);
  state->thread = nullptr;
  Costs* counting = state->count_access ? &costs : nullptr;
  if (const Failure* failure = run_threadgroup(*state, kernel.entry, order.kind, random, counting))
    broken(failure->rule.c_str(),
           failure->message + place(*failure) + " in order " + order_name(order) + again(order_name(order)));
}

// The threadgroups that run, in forward order. A sample has one threadgroup of each of `sample` equal parts of the
// grid. Its place in the part advances by the golden ratio, so that no periodic pattern of the grid is missed.
std::vector<uint64_t> Run::chosen() const {
  const size_t last = settings().last_threadgroups, sample = settings().sample;
  const uint64_t along_x = last ? std::min<uint64_t>(groups[0], last) : groups[0], skipped = groups[0] - along_x;
  std::vector<uint64_t> all(along_x * groups[1] * groups[2]);
  for (uint64_t i = 0; i < all.size(); ++i) all[i] = i / along_x * groups[0] + skipped + i % along_x;
  if (!sample || all.size() <= sample) return all;
  std::vector<uint64_t> some(sample);
  for (uint64_t i = 0; i < sample; ++i) {
    const uint64_t first = i * all.size() / sample, end = (i + 1) * all.size() / sample;
    const uint64_t fraction = i * 0x9e3779b97f4a7c15 >> 32;  // of 2^32
    some[i] = all[first + (fraction * (end - first) >> 32)];
  }
  return some;
}

void Run::run_once(const Order& order) {
  std::vector<uint64_t> turns = chosen();
  Random random{order.seed};
  if (order.kind == Order::Kind::backward) std::reverse(turns.begin(), turns.end());
  if (order.kind == Order::Kind::random)
    for (uint64_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[random() % i]);
  state->device_epoch = device_epoch;
  state->threadgroup_epoch = threadgroup_epoch;
  state->device_dispatch_start = ++state->device_epoch;
  Guard guard;
  try {
    for (uint64_t group : turns) {
      guard.allow(settings().seconds);
      run_group(group, order, random);
    }
  } catch (...) {
    device_epoch = state->device_epoch + 1;
    threadgroup_epoch = state->threadgroup_epoch + 1;
    throw;
  }
  device_epoch = state->device_epoch + 1;
  threadgroup_epoch = state->threadgroup_epoch + 1;
  if (state->count_access) costs.threadgroups_run = turns.size();
}

void Run::compare(const Order& order) {
  const std::string first = order_name(settings().orders[0]), second = order_name(order);
  for (Writable& w : writable) {
    auto [a, b] = std::mismatch(w.first.begin(), w.first.end(), w.begin);
    if (a != w.first.end())
      broken("order", "byte " + str(uint64_t(a - w.first.begin())) + " of " + argument_name(*w.parameter) +
                          " differs between the orders " + first + " and " + second + again(first + "," + second));
  }
}

void Run::run_all() {
  const std::vector<Order>& orders = settings().orders;
  bool several = orders.size() > 1;
  for (Writable& w : writable)
    if (several) w.before.assign(w.begin, w.begin + w.size);
  for (size_t i = 0; i < orders.size(); ++i) {
    for (Writable& w : writable)
      if (i) std::copy(w.before.begin(), w.before.end(), w.begin);
    state->count_access = settings().costs && !i ? metal_sim::count_access : nullptr;
    run_once(orders[i]);
    if (i) compare(orders[i]);
    for (Writable& w : writable)
      if (several && !i) w.first.assign(w.begin, w.begin + w.size);
  }
}

std::string json(const Costs& c) {
  const std::pair<const char*, uint64_t> fields[] = {
      {"device_loaded", c.device_loaded},
      {"device_stored", c.device_stored},
      {"constant_loaded", c.constant_loaded},
      {"threadgroup_loaded", c.threadgroup_loaded},
      {"threadgroup_stored", c.threadgroup_stored},
      {"matrix_multiplications", c.matrix_multiplications},
      {"simd_functions", c.simd_functions},
      {"simdgroup_barriers", c.simdgroup_barriers},
      {"threadgroup_barriers", c.threadgroup_barriers},
      {"threadgroups", c.threadgroups},
      {"threadgroups_run", c.threadgroups_run},
  };
  std::string text;
  for (const auto& [name, value] : fields)
    text += (text.empty() ? "{\"" : ",\"") + std::string(name) + "\":" + str(value);
  return text + "}";
}

// Flushes this thread's subnormal floats to 0 during its lifetime, if the settings say so.
class Subnormals {
 public:
  Subnormals() {
    if (has_arithmetic("flush_float")) set(before_ | kFlushed);
  }
  ~Subnormals() { set(before_); }
  Subnormals(const Subnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Word = unsigned;
  static constexpr Word kFlushed = 0x8040;  // results, and operands
  static Word get() { return __builtin_ia32_stmxcsr(); }
  static void set(Word word) { __builtin_ia32_ldmxcsr(word); }
#else
  using Word = uint64_t;
  static constexpr Word kFlushed = 1 << 24;
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#endif
  Word before_ = get();
};

std::optional<Costs> dispatch(const Kernel& kernel, const std::array<Argument, buffer_slots>& buffers,
                              const std::array<size_t, buffer_slots>& threadgroup_lengths, Size grid,
                              Size threads_per_threadgroup, bool exact_threads) {
  std::lock_guard lock(one_dispatch);
  Run run{kernel, buffers, threadgroup_lengths, grid, threads_per_threadgroup, exact_threads, kernel.library.lock()};
  if (!run.library) throw std::runtime_error("the library of kernel '" + kernel.name + "' is gone");
  Run::current = &run;
  constexpr uint32_t nearly_full = 0xf0000000;
  if (device_epoch > nearly_full || threadgroup_epoch > nearly_full)
    throw std::runtime_error("metal_sim: too many dispatches in one process");
  const Subnormals subnormals;
  run.prepare();
  run.run_all();
  device_shadow.trim();
  if (!settings().costs) return std::nullopt;
  run.costs.threadgroups = run.groups[0] * run.groups[1] * run.groups[2];
  return run.costs;
}

}  // namespace metal_sim
