// What x86 adds for GGML's blocks of 256 columns in groups of 32.
#include "cpu/x86/formats/ggml_k.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(Blocks<Q4_K>)
MOE_METAL_X86_ROWS_OF(Blocks<Q5_K>)
MOE_METAL_X86_ROWS_OF(Blocks<Iq4Xs>)

}  // namespace moe_metal::x86
