// Rows of GGML's blocks of 256 columns in groups of 32.
#include "cpu/formats/ggml_k.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Blocks<Q4_K>)
MOE_METAL_ROWS_OF(Blocks<Q5_K>)
MOE_METAL_ROWS_OF(Blocks<Iq4Xs>)

}  // namespace moe_metal
