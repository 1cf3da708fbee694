// Chooses how an op is computed for how many tokens, with the measurements that justify it. H, I, E and K are a model's
// sizes, and T is the number of tokens; times are on 2 cores.
#pragma once
#include <ATen/native/CPUBlas.h>

#include <algorithm>

#include "contract.h"
#include "cpu/processor.h"

namespace moe_metal {

// How many of `left` tokens to take now: at most `most`, and about as many each time. Of five, at most four at a time,
// three and then two.
inline int64_t even_part(int64_t left, int64_t most) { return at::divup(left, at::divup(left, most)); }

// ------------------------------------------------------------------------------------------------ rows of a weight

// The most tokens of one product, which bounds the scratch memory of a thread. Meanwhile the weights (or, without a
// panel, the tokens) stay in its cache.
constexpr int64_t kTokens = 256, kTokensByRows = 64;

// From how many tokens on it pays to transpose weights in cache (Panel). H = 2048, I = 768, E = 128, K = 8 in float
// with AVX-512: at T = 512 (32 tokens for each expert) 318 ms instead of 350 and at 4096 1.77 s instead of 2.29. With
// AVX2, whose fewer registers hold fewer rows, 128 columns of a row take 50 ns instead of 40 at 10 tokens in dense
// bfloat16, 60 instead of 50 in 4-bit affine, and 96 instead of 116 in q6_k (one core of a Zen 3).
constexpr int64_t kWorthTransposing = kVectorRegisters == 32 ? 32 : 10;

// Packed rows: the most tokens for dot products with special instructions (weights/processor_dots.h).
constexpr int64_t kFewTokens = 8;
// Packed rows: from how many tokens on AMX's integer tiles are used. Dot products read weights once for up to four.
// With AMX from three tokens on, experts at T = 32 take 1.13 times as long in mxfp4, 1.07 in 4- and 8-bit affine, and
// as long in q4_k and q8_0.
constexpr int64_t kWorthIntegerTiles = 5;

// Packed rows: from how many tokens on IntegerPanels are used, and from how many tokens per expert on tokens are
// prepared for them. On two cores of an Ice Lake at T = 128 (8 tokens per expert), 4-bit affine takes 61 to 84 ms and
// 109 to 114 without them, q4_k 72 to 96 and 97 to 150, q8_0 76 to 112 and 101 to 152; at T = 64 there is no
// difference. `linear` of 4096 x 2048 takes 1.0 to 1.9 ms at T = 8 either way.
constexpr int64_t kWorthIntegerPanels = 7, kWorthPreparing = 4;
// From how many tokens on four panels are multiplied by the same few tokens, because the tokens of a product no longer
// stay in the L1 cache from one panel to the next. At T = 4096 (256 tokens per expert) affine4 takes 0.81 of the time,
// mxfp4 0.78 and q6_k 0.83 (an Intel, AMX switched off). At T = 128 affine4 and q6_k took 1.08 and 1.06.
constexpr int64_t kWorthPanelsTogether = 64;

#ifdef MOE_METAL_HAS_AVX512
// Whether to multiply tiles of bfloat16. An Intel without AMX multiplies floats faster (two cores of an Emerald Rapids,
// AMX switched off, two runs in turn): dense experts at T = 64, 512 and 4096 take 156 to 159, 372 to 379 and 2,650 ms
// with tiles, and 69 to 76, 267 to 301 and 2,227 ms in float.
inline bool tiles_available() { return amx_available() || bfloat16_is_fast(); }
// Whether to multiply packed weights by many tokens as integers: IntegerPanels. At T = 512 they take 0.49 to 0.73 of
// the time of floats on an Ice Lake, and 0.61 to 0.71 on the Emerald Rapids.
inline bool integer_panels_are_fast() { return vnni_available() && !tiles_available(); }
#endif

// ------------------------------------------------------------------------------------------------ experts

// Whether `inner`, the intermediate result, may be rounded to bfloat16: only if the activations are bfloat16, and not
// with tiny matrices, where rounding errors do not average out.
inline bool inner_may_be_rounded(const Experts& call) {
  return call.x.scalar_type() == at::kBFloat16 && std::min(call.H, call.I) >= 64;
}

enum class ExpertsWay { dots, columns, tiles };

// Dense weights with contiguous columns, and few slots: with many, the partial sums would be larger than the weights.
inline bool experts_fit_columns(const Experts& call) {
  const Weight &gate_up = call.gate_up, &down = call.down;
  return gate_up.format->is_dense() && down.format->is_dense() && gate_up.row == 1 && down.row == 1 &&
         gate_up.gap == 0 && gate_up.column != 1 && down.column != 1 && call.T * call.K <= 256;
}

#ifdef MOE_METAL_HAS_AVX512
// Whether BFloat16Dots multiplies up to about 12 tokens fast by weights of this format. Affine codes of 2, 3 and 5 bits
// take more time to unpack, and were not measured; the numbers of iq4 have 8 bits.
inline bool bfloat16_dots_are_fast(const Format& format) {
  const bool small = format.data == DataType::words ? format.bits == 4 : format.bits <= 5;
  return bfloat16_is_fast() && !format.is_dense() && small && !format.name.starts_with("iq4");
}

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
  return tiles_available() && slots >= tokens_of_an_expert * experts && inner_may_be_rounded(call);
}
#endif

// slots: the number of slots; experts: the number of experts that have any.
inline ExpertsWay experts_way(const Experts& call, [[maybe_unused]] int64_t slots, [[maybe_unused]] int64_t experts) {
  if (experts_fit_columns(call)) return ExpertsWay::columns;
#ifdef MOE_METAL_HAS_AVX512
  if (experts_fit_tiles(call, slots, experts)) return ExpertsWay::tiles;
#endif
  return ExpertsWay::dots;
}

// ------------------------------------------------------------------------------------------------ linear

#ifdef MOE_METAL_HAS_AVX512
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
#endif

// ------------------------------------------------------------------------------------------------ gate

enum class GateWay { dots, tiles, vectors, float_blocks, bfloat16_blocks };

// E = 128 and H = 2048. With AMX, tiles take 14 us at T = 8 and dots 38; at 1024 blocks take 391 and tiles 467. On one
// core of a Zen 4, tiles take 47 us at T = 8 and dots 51; at 64 tiles take 185 and float blocks 361; at 4096 12 ms and
// 24. Vectors take 0.85 to 0.98 of the time of tiles from 80 tokens of each thread on, and 1.06 at 68. At 64, float
// blocks take 239 us and dots 305. A normed row is float and takes three products in bfloat16, which are only faster
// with AMX.
inline GateWay gate_way([[maybe_unused]] const Gate& call) {
#ifdef MOE_METAL_HAS_AVX512
  const bool bfloat16 = call.hidden.scalar_type() == at::kBFloat16 && call.router_weight.scalar_type() == at::kBFloat16;
  if (call.T > 4 && bfloat16 && amx_available()) {
    // torch.backends.mkldnn or ONEDNN_MAX_CPU_ISA may disable AMX in oneDNN.
    const bool pairs = call.H % 2 == 0 && !call.norm_weight.defined() && at::native::cpublas::could_pack(at::kBFloat16);
    return pairs && call.T > 256 ? GateWay::bfloat16_blocks : GateWay::tiles;
  }
  if (call.T > 4 && bfloat16 && bfloat16_available() && !call.norm_weight.defined()) {
    return call.T >= 80 * at::get_num_threads() ? GateWay::vectors : GateWay::tiles;
  }
  if (call.T > 32) return GateWay::float_blocks;
#endif
  return GateWay::dots;
}

}  // namespace moe_metal
