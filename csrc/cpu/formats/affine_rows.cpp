// Rows in format affine with widths that divide a byte.
#include "cpu/formats/affine.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Affine<2>)
MOE_METAL_ROWS_OF(Affine<4>)
MOE_METAL_ROWS_OF(Affine<8>)

}  // namespace moe_metal
