// Rows of GGML's blocks of 32 columns.
#include "cpu/formats/ggml_32.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Blocks<Q4_0>)
MOE_METAL_ROWS_OF(Blocks<Q4_1>)
MOE_METAL_ROWS_OF(Blocks<Q5_0>)
MOE_METAL_ROWS_OF(Blocks<Q5_1>)

}  // namespace moe_metal
