// The op glu: the dimensions of its arguments are merged into three.
#include <torch/library.h>

#include "contract.h"
#include "mps/launch.h"

namespace moe_metal {
namespace {

constexpr int kThreads = 256;
Kernels kernels("glu", kThreads);

struct Dimension {
  int64_t size = 1, gate = 0, up = 0;  // strides
};

// The dimensions of gate and up, innermost first. Dimensions that are contiguous in both tensors are merged.
struct Layout {
  std::array<Dimension, 3> dimensions;
  bool fits = true;  // three dimensions are enough

  Layout(const Tensor& gate, const Tensor& up) {
    size_t count = 0;
    for (int64_t d = gate.dim() - 1; d >= 0; --d) {
      const Dimension next = {gate.size(d), gate.stride(d), up.stride(d)};
      if (next.size == 1) continue;
      Dimension* last = count ? &dimensions[count - 1] : nullptr;
      if (last && next.gate == last->gate * last->size && next.up == last->up * last->size) {
        last->size *= next.size;
      } else if (count < dimensions.size()) {
        dimensions[count++] = next;
      } else {
        fits = false;
      }
    }
    if (count == 0) dimensions[0] = {1, 1, 1};
  }
};

GluAccess access(const Glu& call, const Layout& layout) {
  const auto& [inner, middle, outer] = layout.dimensions;
  const auto fours = [](auto... values) { return ((values % kVectorWidth == 0) && ...); };
  const bool one_row = middle.size * outer.size == 1;
  if (!one_row && !fours(inner.size, middle.gate, middle.up, outer.gate, outer.up)) return GluAccess::strided;
  const int64_t gate = call.gate.storage_offset(), up = call.up.storage_offset();
  if (inner.gate == 1 && inner.up == 1 && fours(gate, up)) return GluAccess::contiguous;
  const bool alternate = inner.gate == 2 && inner.up == 2 && call.gate.is_alias_of(call.up) && up == gate + 1 &&
                         middle.gate == middle.up && outer.gate == outer.up;
  return alternate && fours(gate) ? GluAccess::interleaved : GluAccess::strided;
}

GluStrides strides(const Layout& layout, int64_t Dimension::* tensor) {
  const auto& [inner, middle, outer] = layout.dimensions;
  return {static_cast<uint64_t>(outer.*tensor), static_cast<uint64_t>(middle.*tensor),
          static_cast<uint64_t>(inner.*tensor)};
}

GluParams glu_params(const Glu& call, const Layout& layout) {
  const auto& [inner, middle, outer] = layout.dimensions;
  const int64_t chunks = ceil_div(inner.size, kVectorWidth);
  return {
      .gate = strides(layout, &Dimension::gate),
      .up = strides(layout, &Dimension::up),
      .inner = static_cast<uint64_t>(inner.size),
      .middle = to_uint(middle.size),
      .chunks = to_uint(chunks),
      .all_chunks = to_uint(chunks * middle.size * outer.size),
      .access = access(call, layout),
      .activation = call.params,
  };
}

void run(Glu& call) {
  Layout layout(call.gate, call.up);
  if (!layout.fits) {
    call.gate = call.gate.contiguous();
    call.up = call.up.contiguous();
    layout = Layout(call.gate, call.up);
  }
  const GluParams params = glu_params(call, layout);
  launch(kernels[call.gate.scalar_type()], Grid{ceil_div(params.all_chunks, kThreads), 1, kThreads}, call.gate, call.up,
         call.output, params);
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("glu", &moe_metal::glu<moe_metal::run>); }
