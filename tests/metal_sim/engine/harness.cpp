// The engine for ctypes, called by __init__.py. It needs neither PyTorch nor the simulated device.
#include <cstring>
#include <exception>
#include <sstream>
#include <string>

#include "engine.h"

using namespace metal_sim;

namespace {
thread_local std::string error_rule, error_message, text;

// Returns 0, or 1 for a compile error, 2 for a violation, 3 for any other error.
template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const CompileError& e) {
    error_rule = "compile";
    error_message = e.what();
    return 1;
  } catch (const Violation& e) {
    error_rule = e.rule;
    error_message = e.what();
    return 2;
  } catch (const std::exception& e) {
    error_rule = "error";
    error_message = e.what();
    return 3;
  }
}
}  // namespace

extern "C" {

struct HarnessArgument {
  uint32_t kind;  // 0 unbound, 1 buffer, 2 bytes
  std::byte* data;
  size_t length;
  size_t offset;
};

const char* harness_rule() { return error_rule.c_str(); }
const char* harness_message() { return error_message.c_str(); }

// macros: one NAME=VALUE per line.
int harness_compile(const char* source, int version, const char* macros, std::shared_ptr<Library>** out) {
  return guarded([&] {
    CompileOptions options;
    options.metal_version = version;
    std::istringstream lines(macros);
    for (std::string name, value; std::getline(lines, name, '=') && std::getline(lines, value);)
      options.macros[name] = value;
    *out = new std::shared_ptr<Library>(Library::compile(source, options));
  });
}

const char* harness_names(const std::shared_ptr<Library>* library) {
  text.clear();
  for (const std::string& name : (*library)->names()) text += name + "\n";
  return text.c_str();
}

const Kernel* harness_find(const std::shared_ptr<Library>* library, const char* name) { return (*library)->find(name); }

// One line per parameter: name space index const reference size alignment.
const char* harness_parameters(const Kernel* kernel) {
  text.clear();
  const char* const spaces[] = {"device", "constant", "threadgroup"};
  for (const Parameter& p : kernel->parameters)
    text += p.name + " " + spaces[int(p.space)] + " " + std::to_string(p.index) + " " + std::to_string(p.is_const) +
            " " + std::to_string(p.is_reference) + " " + std::to_string(p.element_size) + " " +
            std::to_string(p.element_alignment) + "\n";
  return text.c_str();
}
// The costs of the last dispatch; empty if they were not counted.
const char* harness_costs() { return text.c_str(); }

size_t harness_static_bytes(const Kernel* kernel) { return kernel->static_threadgroup_bytes; }

int harness_dispatch(const Kernel* kernel, const HarnessArgument* arguments, const size_t* lengths,
                     const uint64_t* grid, const uint64_t* threads, int exact) {
  return guarded([&] {
    std::array<Argument, buffer_slots> buffers;
    std::array<size_t, buffer_slots> threadgroup_lengths;
    for (size_t i = 0; i < buffer_slots; ++i) {
      const HarnessArgument& a = arguments[i];
      buffers[i].kind = static_cast<Argument::Kind>(a.kind);
      if (a.kind == 2) buffers[i].bytes.assign(a.data, a.data + a.length);
      if (a.kind == 1) buffers[i].data = a.data, buffers[i].length = a.length, buffers[i].offset = a.offset;
      threadgroup_lengths[i] = lengths[i];
    }
    const auto costs = dispatch(*kernel, buffers, threadgroup_lengths, {grid[0], grid[1], grid[2]},
                                {threads[0], threads[1], threads[2]}, exact != 0);
    text = costs ? json(*costs) : "";
  });
}

void harness_set_seconds(double seconds) { settings().seconds = seconds; }
void harness_set_races(int on) { settings().races = on != 0; }
void harness_set_costs(int on, size_t sample) {
  settings().costs = on != 0;
  settings().sample = sample;
}
// kinds: 0 forward, 1 backward, 2 random with its seed
void harness_set_orders(const uint32_t* kinds, const uint64_t* seeds, size_t count) {
  settings().orders.clear();
  for (size_t i = 0; i < count; ++i) settings().orders.push_back({static_cast<Order::Kind>(kinds[i]), seeds[i]});
}
}
