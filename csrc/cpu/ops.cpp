// Registers the CPU kernels, in one file because PyTorch's templates take seconds to compile, mostly per file.
#include "recorded.h"

#include <torch/library.h>

namespace moe_metal {

namespace cpu {
inline void together(c10::function_ref<void()> all) { all(); }
}  // namespace cpu

#define MOE_METAL_REGISTER(name) m.impl(#name, &Op<check_##name>::call<cpu::run_##name>);
#define MOE_METAL_REGISTER_CACHE(name) m.impl("_" #name, &Op<check_##name>::call<cpu::run_##name>);
TORCH_LIBRARY_IMPL(moe_metal, CPU, m){MOE_METAL_OPS(MOE_METAL_REGISTER) MOE_METAL_CACHE_OPS(MOE_METAL_REGISTER_CACHE)}
#define MOE_METAL_RECORD(name) m.impl(#name, &Recording<check_##name>::call<cpu::run_##name, cpu::together>);
#define MOE_METAL_RECORD_CACHE(name) m.impl("_" #name, &Recording<check_##name>::call<cpu::run_##name, cpu::together>);
TORCH_LIBRARY_IMPL(moe_metal_tape, CPU, m) {
  MOE_METAL_OPS(MOE_METAL_RECORD) MOE_METAL_CACHE_OPS(MOE_METAL_RECORD_CACHE)
}

}  // namespace moe_metal
