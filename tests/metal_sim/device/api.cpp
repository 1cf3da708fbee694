// The simulator's functions for __init__.py, as `torch.ops.metal_sim.*`.
#include <torch/library.h>

#include <iomanip>
#include <sstream>

#include "sim.h"

namespace metal_sim {
namespace {

template <typename Range, typename Each>
std::string joined(char open, const Range& range, char close, Each each) {
  std::string text(1, open);
  for (const auto& item : range) text += (text.size() > 1 ? "," : "") + each(item);
  return text + close;
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) result += c == '"' || c == '\\' ? std::string{'\\', c} : std::string(1, c);
  return result + '"';
}

std::string json(const Size& size) {
  std::ostringstream text;
  text << '[' << size.x << ',' << size.y << ',' << size.z << ']';
  return text.str();
}

std::string json(const Bound& argument) {
  std::ostringstream text;
  text << "{\"index\":" << argument.index << ",\"contents\":" << reinterpret_cast<uintptr_t>(argument.contents)
       << ",\"offset\":" << argument.offset << ",\"length\":" << argument.length << ",\"bytes\":\"" << std::hex
       << std::setfill('0');
  for (std::byte byte : argument.bytes) text << std::setw(2) << static_cast<int>(byte);
  text << "\"}";
  return text.str();
}

std::string json(const Dispatch& d) {
  std::ostringstream text;
  text << "{\"kernel\":" << quoted(d.kernel) << ",\"label\":" << quoted(d.label) << ",\"grid\":" << json(d.grid)
       << ",\"threads\":" << json(d.threads) << ",\"exact_threads\":" << (d.exact_threads ? "true" : "false")
       << ",\"threadgroup_bytes\":" << d.threadgroup_bytes << ",\"buffer_bytes\":" << d.buffer_bytes
       << ",\"constant_bytes\":" << d.constant_bytes << ",\"seconds\":" << d.seconds
       << ",\"costs\":" << (d.costs ? json(*d.costs) : "null")
       << ",\"arguments\":" << joined('[', d.arguments, ']', [](auto& argument) { return json(argument); }) << '}';
  return text.str();
}

std::string json(const std::map<std::string, long>& counts) {
  return joined('{', counts, '}', [](auto& item) { return quoted(item.first) + ":" + std::to_string(item.second); });
}

std::string json(const Compiled& library) {
  const auto truth = [](bool value) { return value ? "true" : "false"; };
  return std::string("{\"metal_version\":") + std::to_string(library.metal_version) +
         ",\"safe\":" + truth(library.safe) + ",\"precise\":" + truth(library.precise) +
         ",\"concurrently\":" + truth(library.concurrently) + '}';
}

// All counters as JSON. The lists grow until `clear`.
std::string read_counters() {
  QueueScope queue("metal_sim::counters");
  std::lock_guard lock(counters_mutex());
  const Counters& c = counters();
  return "{\"dispatches\":" + joined('[', c.dispatches, ']', [](auto& d) { return json(d); }) +
         ",\"host_syncs\":" + joined('[', c.host_syncs, ']', quoted) + ",\"commits\":" + std::to_string(c.commits) +
         ",\"blocks\":" + std::to_string(c.blocks) + ",\"messages\":" + std::to_string(c.messages) +
         ",\"aten_ops\":" + std::to_string(c.aten_ops) + ",\"live_objects\":" + json(c.live_objects) +
         ",\"made_objects\":" + json(c.made_objects) +
         ",\"compiled\":" + joined('[', compiled(), ']', [](auto& library) { return json(library); }) + "}";
}

void clear() {
  QueueScope queue("metal_sim::clear");
  end_encoder();
  std::lock_guard lock(counters_mutex());
  counters().dispatches.clear();
  counters().host_syncs.clear();
  counters().commits = counters().blocks = counters().messages = counters().aten_ops = 0;
}

Order order(const std::string& text) {
  if (text == "forward") return {Order::Kind::forward};
  if (text == "backward") return {Order::Kind::backward};
  TORCH_CHECK(text.rfind("random:", 0) == 0, "metal_sim: expected forward, backward or random:SEED, got ", text);
  return {Order::Kind::random, std::stoull(text.substr(7))};
}

void set_orders(const std::vector<std::string>& names) {
  QueueScope queue("metal_sim::set_orders");
  TORCH_CHECK(!names.empty(), "metal_sim: at least one order is needed");
  settings().orders.clear();
  for (const auto& name : names) settings().orders.push_back(order(name));
}

// The address of a tensor's buffer, which identifies it in recorded dispatches.
int64_t contents(const at::Tensor& tensor) {
  const Memory* memory = find_memory(tensor.storage().data());
  TORCH_CHECK(memory, "metal_sim: expected a tensor in a Metal buffer");
  return reinterpret_cast<int64_t>(memory->bytes);
}

void set_host_only(bool value) { options().host_only = value; }
void set_more_threadgroups(int64_t count) { options().more_threadgroups = count; }
void set_concurrent(bool value) { options().concurrent = value; }
void set_flushes(bool value) { options().flushes = value; }
void set_records(bool value) { options().records = value; }
void set_last_threadgroups(int64_t count) { settings().last_threadgroups = count; }
void set_costs(bool on, int64_t sample) {
  settings().costs = on;
  settings().sample = sample;
}
void set_macos(int64_t major, int64_t minor, bool for_older_sdk) {
  options().macos = {major, minor};
  options().for_older_sdk = for_older_sdk;
}
void set_gpu(std::string name, int64_t family) {
  options().gpu = std::move(name);
  options().family = family;
}
void set_memory(int64_t max_buffer, int64_t working_set, bool local_volumes, bool takes_pages) {
  options().max_buffer = max_buffer;
  options().working_set = working_set;
  options().local_volumes = local_volumes;
  options().takes_pages = takes_pages;
}
void set_commit_error(std::string what) { options().commit_error = std::move(what); }

void synchronize() {
  QueueScope queue("synchronize");
  end_encoder();
  complete();
  check_guards();
}

TORCH_LIBRARY(metal_sim, m) {
  m.def("counters() -> str", &read_counters);
  m.def("clear() -> ()", &clear);
  m.def("set_orders(str[] names) -> ()", &set_orders);
  m.def("set_host_only(bool value) -> ()", &set_host_only);
  m.def("set_more_threadgroups(int count) -> ()", &set_more_threadgroups);
  m.def("set_concurrent(bool value) -> ()", &set_concurrent);
  m.def("set_flushes(bool value) -> ()", &set_flushes);
  m.def("set_records(bool value) -> ()", &set_records);
  m.def("set_last_threadgroups(int count) -> ()", &set_last_threadgroups);
  m.def("set_costs(bool on, int sample) -> ()", &set_costs);
  m.def("set_macos(int major, int minor, bool for_older_sdk) -> ()", &set_macos);
  m.def("set_gpu(str name, int family) -> ()", &set_gpu);
  m.def("set_commit_error(str what) -> ()", &set_commit_error);
  m.def("set_memory(int max_buffer, int working_set, bool local_volumes, bool takes_pages) -> ()", &set_memory);
  m.def("synchronize() -> ()", &synchronize);
  m.def("contents(Tensor tensor) -> int", &contents);
  m.def("allocated_bytes() -> int", [] { return int64_t(allocated_bytes()); });
  m.def("driver_bytes() -> int", [] { return int64_t(allocated_bytes() + given_bytes()); });
  m.def("working_set() -> int", [] { return int64_t(options().working_set); });
}

}  // namespace
}  // namespace metal_sim
