// Launch parameters that depend on the GPU. The defaults are reasoned, not measured; `python -m torch_moe_metal tune`
// measures the alternatives on a machine. They only change how the work is divided and the order of sums;
// `tensor_ops` also changes where results are rounded.
#pragma once
#include <cstdint>

namespace moe_metal {

struct Tuning {
  // Decode, lanes along the columns: simdgroups of a threadgroup, unless a row is divided into more parts. A power of
  // two, at most kRowSimdgroups. MLX's matrix-vector kernels use 4; fewer wait less for each other at the end.
  int64_t decode_simdgroups = 4;
  // Decode: with fewer simdgroups than this, the columns of a row are divided into more parts. 80 cores (the largest
  // M) times 32.
  int64_t target_simdgroups = 80 * 32;
  // Experts: the most slots per expert, in percent, for decode; 0: never decode. Decode reads the weights for each
  // slot. Prefill reads them once for each selected expert, but sorts first and pads matrices to 8 slots. With as many
  // slots as experts, random routing selects 63 % of the experts: decode reads 1.6 times the bytes, minus cache hits.
  int64_t decode_max_slots_percent = 100;
  // Experts, decode of more than one token: from how many slots per expert on, in percent, two slots of an expert are
  // multiplied together, with its weights loaded and unpacked once; 0: never. gate_up pairs any two slots of an expert;
  // down only slots of two neighbouring tokens. Pairs need more registers, which costs more than they save if few
  // tokens share experts. On an H100, pairs in gate_up won from one slot per expert on; those in down won in some
  // formats.
  int64_t gate_up_pairs_percent = 100, down_pairs_percent = 0;
  // Linear: the most tokens for which every few tokens read and unpack the weight again, possibly from the cache. Tiles
  // do it once, but compute 8 tokens even if there is one. The crossover point on Apple's GPUs is a guess.
  int64_t few_tokens = 8;
  // Linear: how many of those tokens are multiplied together, with the weight loaded and unpacked once: 1, 2 or 4. More
  // tokens need more registers, so fewer simdgroups run concurrently.
  int64_t tokens_together = 4;
  // Prefill: from how many slots or tokens per weight on tiles have 32 or 64 rows instead of 16. Larger tiles read the
  // weights less often, and padding rows are skipped: with 16 slots per expert on average, tiles of 16 would read its
  // weights 1.43 times. With 64, a simdgroup has fewer rows of weights, so it reads staged rows more often.
  int64_t tile32_min_rows = 12, tile64_min_rows = 49;
  // Prefill: how many tiles go through all rows of weights together, so that these are read from the cache.
  int64_t tiles_per_band = 8;
  // Prefill, 16-bit activations: from how many slots or tokens per weight on our kernels for the matrix units are used,
  // in `experts` and `linear`, for dense and packed weights; 0: never. The matrix units are those of M5 and newer; M1
  // to M4 have none. Gate and up, the inner activations, each expert's result and packed weights are then rounded to 16
  // bits, and may overflow in float16. They need macOS 26.3 and aligned rows of weights (dense: with contiguous
  // columns; packed: of a multiple of 64 columns). They have not been measured. On M5 the check at first use turns them
  // on (first_use.py), unless `tune` has chosen a value.
  int64_t tensor_ops = 0;
  // Gate, many tokens: with fewer tiles than this, groups of four tokens by four experts are used, which are more
  // threadgroups. Tiles read the least, but a tile is much work for one threadgroup: they pay off once each of 80 cores
  // (the largest M) has one. On an H200, groups were three times as fast for 512 tokens and 128 experts.
  int64_t gate_min_tiles = 80;
  // Norms: threads per row with few rows. With 1024, each has about 52 registers on M1 and M2.
  int64_t row_threads = 512;
  // Attention: if there are too few simdgroups, the keys of the same rows are divided among threadgroups, but each
  // gets at least this many keys per tile of 8 rows. For 128 keys of Qwen3's size 64 KB are read, and partial results
  // of 4 KB are written and read again.
  int64_t attention_keys = 128;
  // Commits: after this many of our dispatches. MLX commits every 40 to 50 operations. A decoder layer has about 15
  // operations, 4 or 5 of which are ours, so 16 of ours correspond to that. They read the selected experts of 3 or 4
  // layers, which takes about 1 ms (estimated); a commit costs about 10 us.
  int64_t commit_dispatches = 16;
  // Commits: after this many of our threads. 2^20 threads of a prefill (Qwen3-30B-A3B's experts for 512 tokens have
  // nearly as many) take 5 to 20 ms (estimated), a fiftieth of macOS's limit. The same number of threads that only add
  // rows takes 0.1 ms, of which a commit is still a small part. Decode has 2^18 in a layer.
  int64_t commit_threads = 1 << 20;
  // Prefill: the most floating-point operations of a dispatch, in millions. macOS kills a command buffer after some
  // seconds, and a command buffer has at least one dispatch; so more tokens are processed in several dispatches. The
  // slowest M1, with 7 cores, has 2.3 TFLOPS: at half of that, a dispatch takes 0.9 s. For DeepSeek-V3 it is 2,100
  // tokens, 66 slots per expert, which fill the largest tiles. `tune` does not change this.
  int64_t dispatch_mflops = 1000000;
};

// The current settings. Python can set them; old ones stay in memory, since other threads may be reading them.
const Tuning& tuning();
void set_tuning(const Tuning& tuning);

}  // namespace moe_metal
