// Rows of GGML's blocks of 256 columns in groups of 16.
#include "cpu/formats/ggml_k.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Blocks<Q2_K>)
MOE_METAL_ROWS_OF(Blocks<Q3_K>)
MOE_METAL_ROWS_OF(Blocks<Q6_K>)

}  // namespace moe_metal
