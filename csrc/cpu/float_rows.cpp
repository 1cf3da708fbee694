// Rows whose numbers are small floats.
#include "cpu/formats/fp8.h"
#include "cpu/formats/mxfp4.h"
#include "packed_rows.h"

namespace moe_metal {

template std::unique_ptr<WeightRows> packed_rows<Mxfp4>(const Weight&, bool);
template std::unique_ptr<WeightRows> packed_rows<Fp8>(const Weight&, bool);

}  // namespace moe_metal
