// Rows of GGML's blocks of 32 columns whose codes are bytes, or are looked up as bytes.
#include "cpu/formats/ggml_32.h"
#include "cpu/weights/packed_rows.h"

namespace moe_metal {

MOE_METAL_ROWS_OF(Blocks<Q8_0>)
MOE_METAL_ROWS_OF(Blocks<Iq4Nl>)
MOE_METAL_ROWS_OF(Blocks<GgmlMxfp4>)

}  // namespace moe_metal
