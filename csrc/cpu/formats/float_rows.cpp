// Rows in formats with small floats.
#include "cpu/formats/e2m1.h"
#include "cpu/formats/e4m3.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(E2m1)
MOE_METAL_ROWS_OF(E4m3Blocks)
MOE_METAL_ROWS_OF(E4m3Groups)

}  // namespace moe_metal
