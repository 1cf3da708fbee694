// Files in Metal buffers without a copy: `_map_file` makes the file's own pages tensors on mps. Only weights that stay
// packed are mapped, since nothing may write these pages.
//
//   FileBuffers   what the tensors of one file share, until the last one is freed: the threads that read the file, and
//                 the residency set
//   Mapping       the pages, until Metal has released the last buffer over them
//
// Pages that are first touched by the GPU are read one after the other, at a fraction of the disk's speed. So threads
// read the file in its order, which fills the system's cache of it.
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "mps/pipelines.h"

#pragma clang diagnostic ignored "-Wunguarded-availability-new"

namespace moe_metal {
namespace {

constexpr size_t kPiece = size_t{4} << 20;  // that a thread reads at once
constexpr size_t kThreads = 8;

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}
size_t page_floor(size_t at) { return at / page_size() * page_size(); }
size_t page_ceil(size_t at) { return page_floor(at + page_size() - 1); }

struct Range {
  size_t begin, end;  // in the file, multiples of a page
  size_t length() const { return end - begin; }
};

// ---------------------------------------------------------------------------------------------- the file

class Mapping {
 public:
  Mapping(const std::string& path, int64_t size) : file(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    TORCH_CHECK_VALUE(file >= 0, "torch_moe_metal: ", path, ": expected a file of ", size,
                      " bytes, got none: ", std::strerror(errno));
    struct stat found = {};
    const bool known = fstat(file, &found) == 0;
    if (known && found.st_size == size) start = mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
    if (start != MAP_FAILED) {
      length_ = page_ceil(size);
      return;
    }
    const int error = errno;
    close(file);
    TORCH_CHECK_VALUE(!known || found.st_size == size, "torch_moe_metal: ", path, ": expected the ", size,
                      " bytes that its header was read from, got ", found.st_size);
    TORCH_CHECK_VALUE(false, "torch_moe_metal: ", path, ": its ", size,
                      " bytes cannot be mapped: ", std::strerror(error));
  }
  ~Mapping() {
    munmap(start, length_);
    close(file);
  }
  Mapping(const Mapping&) = delete;

  // A network's volume may go away or become slow, and then the GPU waits for its pages.
  bool is_local() const {
    struct statfs volume = {};
    return fstatfs(file, &volume) == 0 && (volume.f_flags & MNT_LOCAL);
  }
  char* at(size_t place) const { return static_cast<char*>(start) + place; }
  // Whether these pages are in memory already.
  bool is_cached(Range range) const {
#ifdef __APPLE__
    using Page = char;
#else
    using Page = unsigned char;
#endif
    std::vector<Page> pages(range.length() / page_size());
    if (mincore(at(range.begin), range.length(), pages.data()) != 0) return false;
    return std::all_of(pages.begin(), pages.end(), [](Page page) { return page & 1; });
  }

  const int file;

 private:
  void* start = MAP_FAILED;
  size_t length_ = 0;
};

// ---------------------------------------------------------------------------------------------- residency

// Residency sets, which macOS 15 and newer have. A set keeps its buffers ready for the GPU: without it, each command
// after a pause waits until macOS has done that.
#if !defined(__MAC_OS_X_VERSION_MAX_ALLOWED) || __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
id new_residency_set(id<MTLDevice> device, const std::vector<id<MTLBuffer>>& buffers) {
  if (!is_macos_at_least(15)) return nil;
  MTLResidencySetDescriptor* descriptor = [[[MTLResidencySetDescriptor alloc] init] autorelease];
  id<MTLResidencySet> set = [device newResidencySetWithDescriptor:descriptor error:nil];
  for (id<MTLBuffer> buffer : buffers) [set addAllocation:buffer];
  [set commit];
  return set;
}
void keep_resident(id<MTLResidencySet> set) { [set requestResidency]; }
void end_residency(id<MTLResidencySet> set) {
  [set endResidency];
  [set removeAllAllocations];
  [set release];
}
#else
id new_residency_set(id<MTLDevice>, const std::vector<id<MTLBuffer>>&) { return nil; }
void keep_resident(id) {}
void end_residency(id) {}
#endif

// ---------------------------------------------------------------------------------------------- reading

// Reads ranges of a file, without Python's lock. Its end stops the reading.
class Reader {
 public:
  Reader(std::shared_ptr<const Mapping> mapping, const std::vector<Range>& ranges, id residency)
      : mapping_(std::move(mapping)), residency_(residency) {
    for (const Range& range : ranges) {
      for (size_t at = range.begin; at < range.end; at += kPiece) {
        pieces_.push_back({at, std::min(at + kPiece, range.end)});
      }
    }
    running_ = std::min(kThreads, pieces_.size());
    for (size_t i = running_; i > 0; --i) threads_.emplace_back([this] { run(); });
  }
  ~Reader() {
    is_stopped_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void run() {
    read_pieces();
    if (--running_ > 0 || is_stopped_) return;
    @autoreleasepool {
      keep_resident(residency_);  // only now: Metal would read the pages in its own way
    }
  }
  void read_pieces() {
    std::vector<char> scratch;
    for (size_t i = next_++; i < pieces_.size() && !is_stopped_; i = next_++) {
      const Range piece = pieces_[i];
      if (mapping_->is_cached(piece)) continue;
      scratch.resize(kPiece);
      // Errors are not reported here: whoever uses these pages gets them.
      for (size_t at = piece.begin; at < piece.end && !is_stopped_;) {
        const ssize_t got = pread(mapping_->file, scratch.data(), piece.end - at, static_cast<off_t>(at));
        if (got == 0 || (got < 0 && errno != EINTR)) break;  // 0: the last page is not a whole one
        at += static_cast<size_t>(std::max<ssize_t>(got, 0));
      }
    }
  }

  const std::shared_ptr<const Mapping> mapping_;
  const id residency_;
  std::vector<Range> pieces_;
  std::vector<std::thread> threads_;
  std::atomic<size_t> next_ = 0, running_ = 0;
  std::atomic<bool> is_stopped_ = false;
};

// ---------------------------------------------------------------------------------------------- buffers

// The live buffers over files, and their lengths.
struct Buffers {
  std::mutex mutex;
  std::unordered_map<const void*, size_t> lengths;
};

Buffers& live() {
  static auto& all = *new Buffers;
  return all;
}

bool is_over_a_file(const Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  std::lock_guard lock(live().mutex);
  return live().lengths.count(tensor.storage().data()) > 0;
}

struct FileBuffers {
  std::unique_ptr<Reader> reader;
  id residency = nil;

  ~FileBuffers() {
    reader.reset();
    end_residency(residency);
  }
};

// What a tensor's storage owns: its buffer, and its part of what the file's tensors share.
struct Owned {
  id<MTLBuffer> buffer;
  std::shared_ptr<FileBuffers> file;

  static void release(void* owned) {
    auto* self = static_cast<Owned*>(owned);
    {
      std::lock_guard lock(live().mutex);
      live().lengths.erase((const void*)self->buffer);
    }
    self->file.reset();  // before the buffer: the residency set has it
    [self->buffer release];
    delete self;
  }
};

id<MTLBuffer> buffer_over(id<MTLDevice> device, const std::shared_ptr<Mapping>& mapping, Range range) {
  // Metal calls the deallocator on a thread of its own, after the last command that uses the buffer. It must not need
  // Python.
  auto* held = new std::shared_ptr<Mapping>(mapping);
  constexpr auto options =
      static_cast<MTLResourceOptions>(MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked);
  id<MTLBuffer> buffer = [device newBufferWithBytesNoCopy:mapping->at(range.begin)
                                                   length:range.length()
                                                  options:options
                                              deallocator:^(void*, NSUInteger) {
                                                delete held;
                                              }];
  if (!buffer) delete held;
  return buffer;
}

Tensor tensor_over(id<MTLBuffer> buffer, const std::shared_ptr<FileBuffers>& file, size_t offset, size_t bytes) {
  {
    std::lock_guard lock(live().mutex);
    live().lengths[(const void*)buffer] = [buffer length];
  }
  const c10::Device device(at::kMPS, 0);
  const Tensor whole = at::for_blob((void*)buffer, {static_cast<int64_t>([buffer length])})
                           .context(new Owned{buffer, file}, &Owned::release)
                           .options(at::TensorOptions(at::kByte).device(device))
                           .target_device(device)
                           .make_tensor();
  return whole.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(bytes));
}

// Why these pages should be copied instead, or an empty string.
std::string why_not(id<MTLDevice> device, const Mapping& mapping, size_t bytes) {
  if (!mapping.is_local()) return "its volume is not on this machine";
  const size_t most = [device recommendedMaxWorkingSetSize], used = [device currentAllocatedSize];
  if (bytes + used <= most) return "";
  return c10::str("the GPU's working set is ", most >> 20, " MiB, and it needs ", bytes >> 20, " MiB in addition to ",
                  used >> 20);
}

using Mapped = std::tuple<std::vector<Tensor>, std::string>;

Mapped map_file(const std::string& path, int64_t size, const std::vector<int64_t>& begins,
                const std::vector<int64_t>& ends) {
  TORCH_CHECK_VALUE(begins.size() == ends.size(), "moe_metal: expected as many ends as begins");
  std::vector<Range> ranges;
  size_t bytes = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    TORCH_CHECK_VALUE(0 <= begins[i] && begins[i] < ends[i] && ends[i] <= size, "torch_moe_metal: ", path,
                      ": expected bytes within its ", size, ", got ", begins[i], " to ", ends[i]);
    ranges.push_back({page_floor(begins[i]), page_ceil(ends[i])});
    bytes += ranges.back().length();
  }
  const auto mapping = std::make_shared<Mapping>(path, size);
  @autoreleasepool {
    id<MTLDevice> device = [at::mps::getCurrentMPSStream()->commandQueue() device];
    if (std::string reason = why_not(device, *mapping, bytes); !reason.empty()) return {{}, reason};
    std::vector<id<MTLBuffer>> buffers;
    for (const Range& range : ranges) {
      id<MTLBuffer> buffer = buffer_over(device, mapping, range);
      if (!buffer) {
        for (id<MTLBuffer> made : buffers) [made release];
        return {{}, c10::str("Metal made no buffer over ", range.length() >> 20, " MiB of it")};
      }
      buffers.push_back(buffer);
    }
    const auto file = std::make_shared<FileBuffers>();
    file->residency = new_residency_set(device, buffers);
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < buffers.size(); ++i) {
      tensors.push_back(tensor_over(buffers[i], file, begins[i] - ranges[i].begin, ends[i] - begins[i]));
    }
    file->reader = std::make_unique<Reader>(mapping, ranges, file->residency);
    return {tensors, ""};
  }
}

// ---------------------------------------------------------------------------------------------- for Python

int64_t mapped_bytes() {
  std::lock_guard lock(live().mutex);
  size_t total = 0;
  for (const auto& [buffer, length] : live().lengths) total += length;
  return static_cast<int64_t>(total);
}

int64_t max_buffer_length() {
  return static_cast<int64_t>([[at::mps::getCurrentMPSStream()->commandQueue() device] maxBufferLength]);
}

// The same pages as a tensor on the CPU, which keeps the buffer.
Tensor in_pages(const Tensor& tensor) {
  TORCH_CHECK(is_over_a_file(tensor), "moe_metal: expected a tensor in a file's pages");
  char* bytes = static_cast<char*>([(id<MTLBuffer>)tensor.storage().data() contents]);
  return at::for_blob(bytes + tensor.storage_offset() * tensor.element_size(), tensor.sizes())
      .strides(tensor.strides())
      .context(new Tensor(tensor), [](void* held) { delete static_cast<Tensor*>(held); })
      .options(tensor.options().device(at::kCPU))
      .target_device(at::kCPU)
      .make_tensor();
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_FRAGMENT(moe_metal, m) {
  m.def("_map_file(str path, int size, int[] begins, int[] ends) -> (Tensor[] views, str reason)",
        &moe_metal::map_file);
  m.def("_max_buffer_length() -> int", &moe_metal::max_buffer_length);
  m.def("_mapped_bytes() -> int", &moe_metal::mapped_bytes);
  m.def("_is_mapped(Tensor tensor) -> bool", &moe_metal::is_over_a_file);
  m.def("_in_pages(Tensor tensor) -> Tensor", &moe_metal::in_pages);
}
