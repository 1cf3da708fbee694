// Rows in format affine whose numbers cross from one byte into the next: 3, 5 and 6 bits.
#include "packed_rows.h"

namespace moe_metal {

std::unique_ptr<WeightRows> affine_rows_across_bytes(const Weight& weight, bool bfloat16) {
  if (weight.bits == 3) return std::make_unique<PackedRows<Affine<3>>>(weight, bfloat16);
  if (weight.bits == 5) return std::make_unique<PackedRows<Affine<5>>>(weight, bfloat16);
  return std::make_unique<PackedRows<Affine<6>>>(weight, bfloat16);
}

}  // namespace moe_metal
