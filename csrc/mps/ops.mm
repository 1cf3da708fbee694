// Registers the MPS kernels, in one file because PyTorch's templates take seconds to compile, mostly per file.
#include "mps/launch.h"
#include "recorded.h"
#include "room_class.h"

#include <torch/library.h>

namespace moe_metal {

#define MOE_METAL_REGISTER(name) m.impl(#name, &Op<check_##name>::call<mps::run_##name>);
#define MOE_METAL_REGISTER_CACHE(name) m.impl("_" #name, &Op<check_##name>::call<mps::run_##name>);
TORCH_LIBRARY_IMPL(moe_metal, MPS, m) {
  register_room();
  MOE_METAL_OPS(MOE_METAL_REGISTER) MOE_METAL_CACHE_OPS(MOE_METAL_REGISTER_CACHE)
}
#define MOE_METAL_RECORD(name) m.impl(#name, &Recording<check_##name>::call<mps::run_##name, mps::together>);
#define MOE_METAL_RECORD_CACHE(name) m.impl("_" #name, &Recording<check_##name>::call<mps::run_##name, mps::together>);
TORCH_LIBRARY_IMPL(moe_metal_tape, MPS, m) {
  register_room();

  MOE_METAL_OPS(MOE_METAL_RECORD) MOE_METAL_CACHE_OPS(MOE_METAL_RECORD_CACHE)
}

}  // namespace moe_metal
