// Rows in format affine whose numbers cross from byte to byte.
#include "cpu/formats/affine.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Affine<3>)
MOE_METAL_ROWS_OF(Affine<5>)
MOE_METAL_ROWS_OF(Affine<6>)

}  // namespace moe_metal
