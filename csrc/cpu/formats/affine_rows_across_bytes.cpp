// Rows in format affine with widths that do not divide a byte.
#include "cpu/formats/affine.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Affine<3>)
MOE_METAL_ROWS_OF(Affine<5>)
MOE_METAL_ROWS_OF(Affine<6>)

}  // namespace moe_metal
