// Compiles source text to a loaded library: translate.py, clang, a cache on disk, dlopen. shim/callbacks.cpp, which all
// libraries have, is compiled once.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "engine.h"
#include "shim/abi.h"

namespace metal_sim {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string variable(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

// METAL_SIM_CXX, else the installed clang.
std::string compiler() {
  static const bool has_19 = std::system("command -v clang++-19 >/dev/null 2>&1") == 0;
  return variable("METAL_SIM_CXX", has_19 ? "clang++-19" : "clang++");
}

std::string quote(const std::string& word) {
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Runs a shell command; throws its standard error if it fails.
void run(const std::string& command, const fs::path& errors) {
  int status = std::system((command + " 2>" + quote(errors.string())).c_str());
  if (status != 0) {
    std::string message = read_file(errors);
    throw CompileError(message.empty() ? "failed: " + command : message);
  }
}

std::string hash(const std::string& text) {
  uint64_t a = 0xcbf29ce484222325, b = 0x84222325cbf29ce4;
  for (unsigned char c : text) {
    a = (a ^ c) * 0x100000001b3;
    b = (b ^ c) * 0x9e3779b97f4a7c15 + 1;
  }
  char out[33];
  std::snprintf(out, sizeof(out), "%016llx%016llx", (unsigned long long)a, (unsigned long long)b);
  return out;
}

// The sanitizers in shim/compile_flags.txt only insert calls; shim/callbacks.cpp defines the called functions.
std::string compiler_flags() { return "@" + quote((fs::path(settings().home) / "shim/compile_flags.txt").string()); }

std::string machine_flags() {
#if defined(__x86_64__)
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const std::string machine = v3 ? " -march=x86-64-v3" : "";
#else
  const std::string machine;
#endif
  return machine + (has_arithmetic("contract") ? " -ffp-contract=fast" : "") +
         (has_arithmetic("flush_half") ? " -DMSL_FLUSH_HALF" : "");
}

// What every library depends on.
std::string common_key() {
  std::string all = compiler() + machine_flags() + '\n';
  fs::path home = settings().home;
  for (const char* file : {"translate.py", "metal_rules.py", "metal_tokens.py", "shim/compile_flags.txt", "shim/abi.h",
                           "shim/callbacks.cpp", "shim/metal.h", "shim/parameters.h", "shim/runtime.h", "shim/types.h",
                           "shim/math.h", "shim/simd.h", "shim/mpp.h"})
    all += read_file(home / file);
  return all;
}

// The key of the cache: a hash of everything that the library depends on.
std::string key(const std::string& source, const CompileOptions& options) {
  std::ostringstream all;
  all << options.metal_version << options.fast_math << common_key();
  for (const auto& [name, value] : options.macros) all << name << '=' << value << '\n';
  all << source;
  return hash(all.str());
}

// Messages refer to the shader as program_source:12:3, without the folder.
std::string without_paths(std::string message, const std::string& folder) {
  for (size_t at; (at = message.find(folder + "/")) != std::string::npos;) message.erase(at, folder.size() + 1);
  return message;
}

std::string compile_command(const fs::path& source, const fs::path& object) {
  return compiler() + " " + compiler_flags() + machine_flags() + " -I" +
         quote((fs::path(settings().home) / "shim").string()) + " -c " + quote(source.string()) + " -o " +
         quote(object.string());
}

// The object of shim/callbacks.cpp. `folder` is the caller's own.
fs::path callbacks(const fs::path& folder) {
  fs::path object = fs::path(settings().cache) / (hash(common_key()) + ".callbacks.o"), own = folder / "callbacks.o";
  if (fs::exists(object)) return object;
  run(compile_command(fs::path(settings().home) / "shim/callbacks.cpp", own), folder / "errors");
  fs::rename(own, object);  // atomic, because others may be compiling it too
  return object;
}

void build(const std::string& source, const CompileOptions& options, const fs::path& folder, const fs::path& result) {
  fs::path home = settings().home, errors = folder / "errors";
  write_file(folder / "program_source.metal", source);
  std::string defines = options.fast_math ? " -D__FAST_MATH__=1" : "";
  for (const auto& [name, value] : options.macros) defines += " " + quote("-D" + name + "=" + value);
  auto in = [&](const char* name) { return quote((folder / name).string()); };
  // Without the packages of this Python, which take longer to find than the translation of a small shader.
  std::string python = variable("METAL_SIM_PYTHON", "python3") + " -I -S ";
  run(python + quote((home / "translate.py").string()) + " " + in("program_source.metal") + " -o " +
          in("program_source.cpp") + " --version " + std::to_string(options.metal_version) + defines,
      errors);
  run(compile_command(folder / "program_source.cpp", folder / "program.o"), errors);
  run(compiler() + " -shared -Wl,-Bsymbolic -Wl,-z,defs " + in("program.o") + " " + quote(callbacks(folder).string()) +
          " -lm -o " + in("program.so"),
      errors);
  fs::rename(folder / "program.so", result);  // atomic, because another process may be building the same library
}

void build_in_own_folder(const std::string& source, const CompileOptions& options, const fs::path& result) {
  std::string folder = result.string() + ".XXXXXX";
  if (!mkdtemp(folder.data())) throw CompileError("cannot make a folder in " + settings().cache);
  try {
    build(source, options, folder, result);
  } catch (const CompileError& error) {
    std::string message = without_paths(error.what(), folder);
    fs::remove_all(folder);
    throw CompileError(message);
  }
  fs::remove_all(folder);
}

Parameter described(const abi::ParameterInfo& info) {
  Parameter p;
  p.name = info.name;
  p.space = static_cast<Space>(info.space);
  p.index = info.index;
  p.is_const = info.is_const;
  p.is_reference = info.is_reference;
  p.element_size = info.element_size;
  p.element_alignment = info.element_alignment;
  return p;
}

Kernel described(const abi::KernelInfo& info) {
  Kernel kernel;
  kernel.name = info.name;
  kernel.entry = info.entry;
  kernel.static_threadgroup_bytes = (info.static_bytes + 15) / 16 * 16;
  kernel.static_variables = info.static_count;
  kernel.info = &info;
  if (info.max_threads) kernel.max_threads = std::min<size_t>(info.max_threads, max_threads_per_threadgroup);
  for (uint32_t i = 0; i < info.parameter_count; ++i) kernel.parameters.push_back(described(info.parameters[i]));
  return kernel;
}

void check_limits(const Kernel& kernel) {
  for (const Parameter& p : kernel.parameters)
    if (p.index >= buffer_slots)
      throw CompileError("program_source: error: kernel '" + kernel.name + "': index " + std::to_string(p.index) +
                         " of '" + p.name + "' is above 30");
  if (kernel.static_threadgroup_bytes > max_threadgroup_bytes)
    throw CompileError("program_source: error: kernel '" + kernel.name +
                       "': " + std::to_string(kernel.static_threadgroup_bytes) +
                       " bytes of threadgroup memory, 32768 is the most");
  if (kernel.static_variables > 128)
    throw CompileError("program_source: error: kernel '" + kernel.name + "': more than 128 threadgroup variables");
}

}  // namespace

std::shared_ptr<Library> Library::compile(const std::string& source, const CompileOptions& options) {
  fs::create_directories(settings().cache);
  std::shared_ptr<Library> library(new Library);
  fs::path path = fs::path(settings().cache) / (key(source, options) + ".so");
  if (!fs::exists(path)) build_in_own_folder(source, options, path);
  library->path_ = path.string();
  library->handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library->handle_) throw CompileError(dlerror());
  auto state = reinterpret_cast<abi::State* (*)()>(dlsym(library->handle_, "metal_sim_state"));
  auto kernels = reinterpret_cast<abi::KernelInfo* (*)()>(dlsym(library->handle_, "metal_sim_kernels"));
  library->state_ = state();
  for (const abi::KernelInfo* info = kernels(); info; info = info->next) {
    Kernel kernel = described(*info);
    check_limits(kernel);
    kernel.library = library;
    library->kernels_.emplace(kernel.name, std::move(kernel));
  }
  return library;
}

Library::~Library() {
  // No dlclose: dlopen returns one handle to all users of the same shader, so others may still use it.
}

const Kernel* Library::find(const std::string& name) const {
  auto found = kernels_.find(name);
  return found == kernels_.end() ? nullptr : &found->second;
}

std::vector<std::string> Library::names() const {
  std::vector<std::string> all;
  for (const auto& [name, kernel] : kernels_) all.push_back(name);
  return all;
}

}  // namespace metal_sim
