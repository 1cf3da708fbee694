// Rows in format affine whose numbers fill bytes: 2, 4 and 8 bits.
#include "packed_rows.h"

namespace moe_metal {

std::unique_ptr<WeightRows> affine_rows(const Weight& weight, bool bfloat16) {
  if (weight.bits == 2) return std::make_unique<PackedRows<Affine<2>>>(weight, bfloat16);
  if (weight.bits == 4) return std::make_unique<PackedRows<Affine<4>>>(weight, bfloat16);
  return std::make_unique<PackedRows<Affine<8>>>(weight, bfloat16);
}

}  // namespace moe_metal
