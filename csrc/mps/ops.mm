// Registers the MPS kernels, in one file because PyTorch's templates take seconds to compile, mostly per file.
#include "ops.h"

#include <torch/library.h>

namespace moe_metal {

#define MOE_METAL_REGISTER(name) m.impl(#name, &Op<check_##name>::call<mps::run_##name>);
TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { MOE_METAL_OPS(MOE_METAL_REGISTER) }

}  // namespace moe_metal
