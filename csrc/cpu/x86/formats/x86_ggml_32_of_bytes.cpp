// What x86 adds for GGML's blocks of 32 columns whose codes are bytes, or are looked up as bytes.
#include "cpu/x86/formats/ggml_32.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(Blocks<Q8_0>)
MOE_METAL_X86_ROWS_OF(Blocks<Iq4Nl>)
MOE_METAL_X86_ROWS_OF(Blocks<GgmlMxfp4>)

}  // namespace moe_metal::x86
