// What x86 adds for small floats.
#include "cpu/x86/formats/codes.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(E2m1)
MOE_METAL_X86_ROWS_OF(E4m3Blocks)
MOE_METAL_X86_ROWS_OF(E4m3Groups)

}  // namespace moe_metal::x86
