// The op attention: which kernel, and how the work is divided into threadgroups.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "contract.h"
#include "mps/launch.h"
#include "mps/tuning.h"

namespace moe_metal {
namespace {

Kernels wide64_kernels("attention", "attention_64_wide", kAttentionThreads, "wide64");
Kernels wide128_kernels("attention", "attention_128_wide", kAttentionThreads, "wide128");
Kernels any_kernels("attention", "attention", kAttentionThreads, "any");
Kernels combine_kernels("attention_combine", kCombineThreads);

// A kernel, and how many tiles of columns of keys and of values one of its simdgroups keeps in registers.
struct AttentionKernel {
  Kernels& kernels;
  int64_t key_tiles, value_tiles;
};

// Whether chunks of 8 elements are contiguous and aligned for loads of 16 bytes.
bool is_wide(const Tensor& tensor) {
  const int64_t loaded = 16 / tensor.element_size();
  bool wide = tensor.size(3) % 8 == 0 && tensor.stride(3) == 1 && tensor.storage_offset() % loaded == 0;
  for (int d = 0; d < 3; ++d) wide &= tensor.size(d) == 1 || tensor.stride(d) % loaded == 0;
  return wide;
}

AttentionKernel attention_kernel(const Attention& call) {
  if (!is_wide(call.q) || !is_wide(call.k) || !is_wide(call.v)) return {any_kernels, 4, 2};
  if (call.D <= 64 && call.V <= 64) return {wide64_kernels, 2, 1};
  return {wide128_kernels, 4, 2};
}

AttentionStrides strides(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto of = [&](int d) { return static_cast<uint64_t>(tensor.stride(d)); };
  return {of(0), of(1), of(2), of(3)};
}

MaskType mask_type(const Tensor& mask) {
  if (!mask.defined()) return MaskType::absent;
  if (mask.scalar_type() == at::kBool) return MaskType::boolean;
  return mask.scalar_type() == at::kFloat ? MaskType::float32 : MaskType::activation;
}

AttentionParams attention_params(const Attention& call) {
  return {
      .q = strides(call.q),
      .k = strides(call.k),
      .v = strides(call.v),
      .mask = strides(call.mask),
      .B = to_uint(call.B),
      .A = to_uint(call.A),
      .J = to_uint(call.J),
      .T = to_uint(call.T),
      .S = to_uint(call.S),
      .D = to_uint(call.D),
      .V = to_uint(call.V),
      .rows = to_uint(call.T * (call.A / call.J)),
      .causal = call.causal,
      .window = to_uint(call.window),
      .mask_type = mask_type(call.mask),
      .sinks = parameter_type(call.sinks),
      .scale = call.scale,
      .softcap = call.softcap,
  };
}

// Divides the work into threadgroups. -> their grid
//
// 1. As many simdgroups divide the columns of keys and values as needed to keep them in registers.
// 2. The other simdgroups of the threadgroup get more rows, if there are any: these read the same keys from the cache.
//    Otherwise they get other keys.
// 3. If that leaves too few threadgroups to keep the GPU busy, threadgroups also divide the keys of the same rows, as
//    long as each has enough of them. They write partial sums, which the second kernel combines. Each of these parts is
//    a multiple of the keys that the simdgroups of a threadgroup read at a time, so every simdgroup works to its end.
Grid divide(const Attention& call, const AttentionKernel& kernel, AttentionParams& params) {
  const int64_t key_tiles = ceil_div(call.D, kAttentionKeyColumns);
  const int64_t value_tiles = ceil_div(call.V, kAttentionValueColumns);
  // With the longest keys (576, MLA), 1 tile in 9 is not kept in registers, but loaded again for each 32 keys.
  const auto fits = [&](int64_t column_parts) {
    return column_parts * kernel.key_tiles >= key_tiles && column_parts * kernel.value_tiles >= value_tiles;
  };
  int64_t column_parts = 1, row_tiles = 1;
  while (column_parts < kAttentionSimdgroups && !fits(column_parts)) column_parts *= 2;
  while (column_parts * row_tiles < kAttentionSimdgroups && row_tiles * kAttentionRows < params.rows) row_tiles *= 2;
  const int64_t row_threadgroups = ceil_div(params.rows, row_tiles * kAttentionRows);
  const int64_t column_threadgroups = ceil_div(value_tiles, column_parts * kernel.value_tiles);
  const int64_t x = row_threadgroups * call.B * call.J;
  const int64_t first = call.first_key(0), keys = call.last_key(call.T - 1) - first;
  const int64_t enough = tuning().target_simdgroups / (kAttentionSimdgroups * x * column_threadgroups);
  const int64_t most = std::min(enough, ceil_div(keys, tuning().attention_keys * row_tiles));
  const int64_t keys_at_once = kAttentionKeys * (kAttentionSimdgroups / column_parts / row_tiles);
  const int64_t part_keys = ceil_div(ceil_div(keys, std::max<int64_t>(most, 1)), keys_at_once) * keys_at_once;
  params.column_parts = to_uint(column_parts);
  params.row_tiles = to_uint(row_tiles);
  params.row_threadgroups = to_uint(row_threadgroups);
  params.first_key = to_uint(first);
  params.part_keys = to_uint(part_keys);
  params.parts = keys > 0 ? to_uint(ceil_div(keys, part_keys)) : 1;
  to_uint(x);
  return {x, params.parts * column_threadgroups, kAttentionThreads};
}

void run(const Attention& call) {
  const at::ScalarType dtype = call.q.scalar_type();
  const AttentionKernel kernel = attention_kernel(call);
  AttentionParams params = attention_params(call);
  const Grid grid = divide(call, kernel, params);
  const Tensor none;  // without keys, these tensors have no memory
  const Tensor &k = call.S ? call.k : none, &v = call.S ? call.v : none, &mask = call.S ? call.mask : none;
  if (params.parts == 1) {
    launch(kernel.kernels[dtype], grid, call.q, k, v, mask, call.sinks, call.output, params);
    return;
  }
  const int64_t rows = call.B * call.A * call.T, all = rows * params.parts;
  params.sums_offset = ceil_div(2 * all, kVectorWidth) * kVectorWidth;
  const int64_t length = static_cast<int64_t>(params.sums_offset) + all * ceil_div(call.V, kVectorWidth) * kVectorWidth;
  const Tensor parts = at::empty({length}, call.q.options().dtype(at::kFloat));
  to_uint(rows);
  const int simdgroups = std::min<int>(ceil_div(params.parts, kPartsAtOnce), kCombineSimdgroups);
  launch({{kernel.kernels[dtype], grid, call.q, k, v, mask, call.sinks, parts, params},
          {combine_kernels[dtype], {rows, 1, simdgroups * kSimdgroup}, parts, call.sinks, call.output, params}});
}

}  // namespace
}  // namespace moe_metal

TORCH_LIBRARY_IMPL(moe_metal, MPS, m) { m.impl("attention", &moe_metal::attention<moe_metal::run>); }
