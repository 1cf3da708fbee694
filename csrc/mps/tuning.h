// The numbers that depend on the GPU: defaults by reasoning, until `python -m torch_moe_metal tune` has measured the
// alternatives on the machine itself. None changes what is computed, only how it is cut and the order of sums;
// `matrix_units` also where it is rounded.
#pragma once
#include <cstdint>

namespace moe_metal {

struct Tuning {
  // Decode, lanes along the columns: simdgroups of a threadgroup, as far as rows are not shared by more. A power of
  // two, at most kChunkSimdgroups. MLX's matrix-vector kernels take 4; fewer wait less for one another at the end.
  int64_t decode_simdgroups = 4;
  // Decode: where there are fewer simdgroups than these, more share the columns of a row. 80 cores (the largest M)
  // of 32.
  int64_t enough_simdgroups = 80 * 32;
  // Experts: slots per expert, in hundredths, up to which they are decoded. Decode reads each slot's weights, prefill
  // each chosen expert's once, but sorts first and pads matrices to 8 slots. With as many slots as experts, random
  // routing chooses 63 % of the experts: decode would read 1.6 times the bytes, less what the cache spares.
  int64_t decode_slots = 100;
  // Linear: tokens up to which every few read and unpack the weight again, from the cache if that holds it. Tiles do it
  // once, but a matrix of 8 tokens costs as much for one. Where the two meet on Apple's GPUs is a guess.
  int64_t few_tokens = 8;
  // Linear: how many of those tokens are multiplied together, for which the weight is loaded and unpacked once: 1, 2 or
  // 4. More need more registers, so that fewer simdgroups run side by side.
  int64_t tokens_together = 4;
  // Prefill: slots or tokens per weight from which tiles have 32 and 64 rows instead of 16. Larger ones read the
  // weights less often, and rows that only fill are left out: with 16 slots an expert on average, tiles of 16 would
  // walk its weights 1.43 times. Those of 64 leave a simdgroup fewer rows of weights, and so more reads of staged rows
  // for each product.
  int64_t tile32_share = 12, tile64_share = 49;
  // Prefill: tiles that walk all rows of weights together, so that a weight that was read serves them all.
  int64_t band = 8;
  // Prefill, dense weights of 16 bits: slots per expert from which PyTorch's own product of groups is taken, which uses
  // the matrix units of M5 and newer; 0: never. It needs torch 2.15; older ones run our kernels at any number. Gate and
  // up, the inner activations and each expert's result are then rounded to 16 bits, as transformers rounds them, and in
  // float16 may overflow there. Off until `tune` has found it right and faster: it has not been measured, and M1 to M4
  // have no such units.
  int64_t matrix_units = 0;
  // Prefill, activations of 16 bits: slots or tokens per weight from which kernels of our own use the same units, of
  // `experts` and `linear`, for dense and packed weights; 0: never. They go before PyTorch's product and round where it
  // does; packed weights are rounded to 16 bits, too. They need macOS 26.2, and rows of weights that are aligned (dense
  // ones along the columns, packed ones of a multiple of 64 columns). Off for the same reason.
  int64_t tensor_ops = 0;
  // Gate, many tokens: with fewer tiles than these, groups of four tokens by four experts make more threadgroups. Tiles
  // read least, but a tile is slow work for one threadgroup: they pay once each of 80 cores (the largest M) has one. On
  // an H200 groups were three times as fast for 512 tokens and 128 experts.
  int64_t gate_tiles = 80;
  // Norms: threads for a row where there are few rows. 1024 leave each about 52 registers on M1 and M2.
  int64_t row_threads = 512;
  // Attention: where there are fewer simdgroups than enough, threadgroups share the keys of the same rows, but so many
  // keys are left for each, times its tiles of 8 rows. Of 128 keys of Qwen3's size 64 KB are read, and what is found of
  // them is 4 KB, which is written and read again.
  int64_t attention_keys = 128;
  // Our dispatches since the last commit that bring the next one about. MLX commits every 40 to 50 operations. Of a
  // decoder layer's some 15 ours are 4 or 5, so 16 of ours stand for about as many. They read the chosen experts of 3
  // or 4 layers, 1 ms by estimate, and a commit costs some 10 us.
  int64_t commit_dispatches = 16;
  // Their threads that do so, too. 2^20 of a prefill (Qwen3-30B-A3B's experts for 512 tokens have nearly as many) are 5
  // to 20 ms of work by estimate, and so a fiftieth of what macOS bears. The same number of threads that only add rows
  // take 0.1 ms, of which a commit is still a small part. Decode has 2^18 in a layer.
  int64_t commit_threads = 1 << 20;
  // Prefill: millions of floating-point operations of a dispatch. macOS kills a command buffer after some seconds, and
  // it cannot hold less than a dispatch; so of more tokens some are taken at a time. The slowest M1, with 7 cores, has
  // 2.3 TFLOPS: with half of that these are 0.9 s. Of DeepSeek-V3 they are 2,100 tokens, 66 slots an expert, which fill
  // the largest tiles. `tune` leaves this alone.
  int64_t dispatch_mflops = 1000000;
};

// What holds for now. Set from Python; the old numbers stay in memory for those who read them.
const Tuning& tuning();
void set_tuning(const Tuning& tuning);

}  // namespace moe_metal
