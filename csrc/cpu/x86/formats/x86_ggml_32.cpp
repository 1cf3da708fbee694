// What x86 adds for GGML's blocks of 32 columns.
#include "cpu/x86/formats/ggml_32.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(Blocks<Q4_0>)
MOE_METAL_X86_ROWS_OF(Blocks<Q4_1>)
MOE_METAL_X86_ROWS_OF(Blocks<Q5_0>)
MOE_METAL_X86_ROWS_OF(Blocks<Q5_1>)

}  // namespace moe_metal::x86
