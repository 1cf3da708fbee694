// Rows in format affine whose numbers cross from byte to byte.
#include "cpu/formats/affine.h"
#include "packed_rows.h"

namespace moe_metal {

template std::unique_ptr<WeightRows> packed_rows<Affine<3>>(const Weight&, bool);
template std::unique_ptr<WeightRows> packed_rows<Affine<5>>(const Weight&, bool);
template std::unique_ptr<WeightRows> packed_rows<Affine<6>>(const Weight&, bool);

}  // namespace moe_metal
