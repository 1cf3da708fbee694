// Which of x86's products compute how many tokens, with the measurements that justify it. H, I, E and K are a model's
// sizes, and T is the number of tokens; times are on 2 cores.
#pragma once
#include <algorithm>

#include "contract/experts.h"
#include "contract/router.h"
#include "contract/weights.h"
#include "cpu/plan.h"
#include "cpu/x86/processor.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------------ products

// Whether to multiply tiles of bfloat16. An Intel without AMX multiplies floats faster (two cores of an Emerald Rapids,
// AMX switched off, two runs in turn): dense experts at T = 64, 512 and 4096 take 156 to 159, 372 to 379 and 2,650 ms
// with tiles, and 69 to 76, 267 to 301 and 2,227 ms in float.
inline bool tiles_available() { return amx_available() || bfloat16_is_fast(); }

// Whether to multiply packed weights by many tokens as integers: IntegerPanels. At T = 512 they take 0.49 to 0.73 of
// the time of floats on an Ice Lake, and 0.61 to 0.71 on the Emerald Rapids.
inline bool integer_panels_are_fast() { return vnni_available() && !tiles_available(); }

// Packed rows: from how many tokens on IntegerPanels are used. On two cores of an Ice Lake at T = 128 (8 tokens per
// expert), 4-bit affine takes 61 to 84 ms and 109 to 114 without them, q4_k 72 to 96 and 97 to 150, q8_0 76 to 112 and
// 101 to 152; at T = 64 there is no difference. `linear` of 4096 x 2048 takes 1.0 to 1.9 ms at T = 8 either way.
constexpr int64_t kWorthIntegerPanels = 7;
// From how many tokens on four panels are multiplied by the same few tokens, because the tokens of a product no longer
// stay in the L1 cache from one panel to the next. At T = 4096 (256 tokens per expert) affine4 takes 0.81 of the time,
// mxfp4 0.78 and q6_k 0.83 (an Intel, AMX switched off). At T = 128 affine4 and q6_k took 1.08 and 1.06.
constexpr int64_t kWorthPanelsTogether = 64;

// Whether BFloat16Dots multiplies up to about 12 tokens fast by weights of this format. Affine codes of 2, 3 and 5 bits
// take more time to unpack, and were not measured; the numbers of iq4 have 8 bits.
inline bool bfloat16_dots_are_fast(const Format& format) {
  const bool small = format.data == DataType::words ? format.bits == 4 : format.bits <= 5;
  return bfloat16_is_fast() && !format.is_dense() && small && !format.name.starts_with("iq4");
}

// ------------------------------------------------------------------------------------------------ ops

// With AMX, tiles of dense weights reach the memory bandwidth even for one token: with H 2048, I 768, E 128, K 8 on a
// Sapphire Rapids, T = 1 takes 3.0 ms with tiles and 3.7 with dots, T = 512 takes 65 and 390. Packed weights must be
// unpacked first, which does not pay for few tokens. Without AMX, on one core of a Zen 4: dense weights take 81 ms with
// tiles and 74 with dots at T = 32 (2.3 tokens per used expert), 91 and 108 at 64, 236 and 479 at 512. On two cores,
// at 96 (6.2 tokens per expert) q8_0 takes 63 and 56, 8-bit affine 58 and 60, q6_k 68 and 68, 4-bit affine 53 and 34;
// at 128 q8_0 70 and 82; at 192 4-bit affine 68 and 67.
inline bool experts_fit_tiles(const Experts& call, int64_t slots, int64_t experts) {
  const bool dense = call.gate_up.format->is_dense();
  int64_t tokens_of_an_expert = dense ? 4 : bfloat16_dots_are_fast(*call.gate_up.format) ? 12 : 6;
  if (amx_available()) tokens_of_an_expert = dense ? 0 : 8;
  return tiles_available() && slots >= tokens_of_an_expert * experts;
}

// Cycles for 128 columns of a row on one core of a Zen 4: 4-bit affine 102 with tiles and 62 with dots at T = 10, 87
// and 95 at 16; q6_k 95 and 84 at 8, q8_0 88 and 76. With tiny matrices, rounding errors of packed weights do not
// average out.
inline bool linear_fits_tiles(const Linear& call) {
  const Format& format = *call.weight.format;
  int64_t tokens = kFewTokens;
  if (bfloat16_is_fast() && !format.is_dense()) tokens = bfloat16_dots_are_fast(format) ? 16 : kFewTokens + 1;
  return tiles_available() && call.T >= tokens && call.x.scalar_type() == at::kBFloat16 &&
         std::min(call.H, call.N) >= 64;
}

// E = 128 and H = 2048: at T = 8 tiles take 14 us with AMX and dots 38; on one core of a Zen 4, tiles take 47 us and
// dots 51. A normed row is float and takes three products in bfloat16, which are only faster with AMX.
inline bool gate_fits_tiles(const Gate& call) {
  const bool bfloat16 = call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16;
  return call.T > 4 && bfloat16 &&
         (call.norm_weight.defined() ? amx_available() : bfloat16_available() || amx_available());
}

}  // namespace moe_metal
