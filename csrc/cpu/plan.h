// How many tokens and rows are computed together, with the measurements that justify it. x86/plan.h has the rest for
// x86's own products. H, I, E and K are a model's sizes, and T is the number of tokens; times are on 2 cores.
#pragma once
#include "cpu/vector/vec.h"

namespace moe_metal {

// How many of `left` tokens to take now: at most `most`, and about as many each time. Of five, at most four at a time,
// three and then two.
inline int64_t even_part(int64_t left, int64_t most) { return at::divup(left, at::divup(left, most)); }

// The most tokens of one product, which bounds the scratch memory of a thread. Meanwhile the weights (or, without a
// panel, the tokens) stay in its cache.
constexpr int64_t kTokens = 256, kTokensByRows = 64;

// From how many tokens on it pays to transpose weights in cache (Panel). H = 2048, I = 768, E = 128, K = 8 in float
// with AVX-512: at T = 512 (32 tokens for each expert) 318 ms instead of 350 and at 4096 1.77 s instead of 2.29. With
// AVX2, whose fewer registers hold fewer rows, 128 columns of a row take 50 ns instead of 40 at 10 tokens in dense
// bfloat16, 60 instead of 50 in 4-bit affine, and 96 instead of 116 in q6_k (one core of a Zen 3).
constexpr int64_t kWorthTransposing = kVectorRegisters == 32 ? 32 : 10;

// Packed rows: the most tokens for dot products with special instructions (x86/ and arm/).
constexpr int64_t kFewTokens = 8;

// From how many tokens, or tokens per expert, on a processor's own products are offered to prepare all tokens.
constexpr int64_t kWorthPreparing = 4;

}  // namespace moe_metal
