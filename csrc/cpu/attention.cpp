#include "cpu/attention/attention_by_tiles.h"
#include "cpu/processor_ways.h"
#include "ops.h"

namespace moe_metal {

void cpu::run_attention(const Attention& call) {
  if (const auto way = processor_ways().attention; way && way(call)) return;
  with_dtype(call.q.scalar_type(), [&](auto scalar) { attention_by_tiles<FloatProducts<decltype(scalar)>>(call); });
}

}  // namespace moe_metal
