// What x86 adds for widths that divide a byte.
#include "cpu/x86/formats/codes.h"
#include "cpu/x86/packed_rows.h"

namespace moe_metal::x86 {

MOE_METAL_X86_ROWS_OF(Affine<2>)
MOE_METAL_X86_ROWS_OF(Affine<4>)
MOE_METAL_X86_ROWS_OF(Affine<8>)

}  // namespace moe_metal::x86
