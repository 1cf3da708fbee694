// Rows whose numbers are small floats: formats mxfp4 and fp8.
#include "packed_rows.h"

namespace moe_metal {

std::unique_ptr<WeightRows> float_rows(const Weight& weight, bool bfloat16) {
  if (weight.format == Format::mxfp4) return std::make_unique<PackedRows<Mxfp4>>(weight, bfloat16);
  return std::make_unique<PackedRows<Fp8>>(weight, bfloat16);
}

}  // namespace moe_metal
