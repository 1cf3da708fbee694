// Rows in format affine whose numbers fill bytes.
#include "cpu/formats/affine.h"
#include "packed_rows.h"

namespace moe_metal {

template std::unique_ptr<WeightRows> packed_rows<Affine<2>>(const Weight&, bool);
template std::unique_ptr<WeightRows> packed_rows<Affine<4>>(const Weight&, bool);
template std::unique_ptr<WeightRows> packed_rows<Affine<8>>(const Weight&, bool);

}  // namespace moe_metal
