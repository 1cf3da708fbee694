// What x86 adds for widths that do not divide a byte.
#include "cpu/x86/formats/codes.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(Affine<3>)
MOE_METAL_X86_ROWS_OF(Affine<5>)
MOE_METAL_X86_ROWS_OF(Affine<6>)

}  // namespace moe_metal::x86
