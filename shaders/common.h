// Shared by the shaders (Metal) and the host (C++): constants, enums and params structs.
#pragma once
#ifndef __METAL_VERSION__
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#endif

namespace moe_metal {

#ifdef __METAL_VERSION__
#define MOE_METAL_CONSTANT constant constexpr
#else
#define MOE_METAL_CONSTANT constexpr
#endif

MOE_METAL_CONSTANT int kMaxExperts = 1024;
MOE_METAL_CONSTANT int kVectorWidth = 4;     // elements of a vector load or store
MOE_METAL_CONSTANT int kSimdgroup = 32;      // threads of a simdgroup
MOE_METAL_CONSTANT int kMaxSimdgroups = 32;  // in a threadgroup

// The values of options. On the host, names_of(Scoring()) lists their names, which are strings in Python, and
// kNames<Scoring> is an array of them.
#ifdef __METAL_VERSION__
#define MOE_METAL_ENUM(name, ...) enum class name : int32_t { __VA_ARGS__ };
#else
#define MOE_METAL_ENUM(name, ...)            \
  enum class name : int32_t { __VA_ARGS__ }; \
  constexpr std::string_view names_of(name) { return #__VA_ARGS__; }

template <class Enum>
inline constexpr auto kNames = [] {
  constexpr std::string_view all = names_of(Enum());
  std::array<std::string_view, 1 + std::count(all.begin(), all.end(), ',')> names;
  std::string_view rest = all;
  for (std::string_view& name : names) {
    name = rest.substr(0, rest.find(", "));
    rest.remove_prefix(std::min(name.size() + 2, rest.size()));
  }
  return names;
}();
#endif

MOE_METAL_ENUM(Scoring, softmax, sigmoid, sqrt_softplus)
MOE_METAL_ENUM(Renormalize, none, before_scale, after_scale)
MOE_METAL_ENUM(GroupScore, top2_sum, max)
MOE_METAL_ENUM(Rule, delta, sum)
MOE_METAL_ENUM(DecayKind, softplus, sigmoid)
MOE_METAL_ENUM(ChannelOrder, qkv, vkq)
MOE_METAL_ENUM(Pointwise, none, silu, sigmoid)
MOE_METAL_ENUM(Activation, silu, gelu, gelu_tanh, relu2, swiglu_oai, sigmoid)

// The routing options of the ops gate and route.
struct RoutingParams {
  int32_t experts;  // E
  int32_t top_k;    // K
  int32_t n_group;
  int32_t topk_group;
  Scoring scoring;
  Renormalize renormalize;
  GroupScore group_score;
  float scaling_factor;
  float softcap;  // 0: none
  float sum_eps;
};

// The activation options of the ops glu and experts.
struct ActivationParams {
  Activation activation;
  float alpha;
  float limit;  // +inf: none
};

// How glu reads four neighbours of gate and up: one element at a time, with one vector load from each, or with two
// vector loads of interleaved gate and up.
enum class GluAccess : int32_t { strided, contiguous, interleaved };

// Strides in elements.
struct GluStrides {
  uint64_t outer, middle, inner;
};

// The op glu. [outer, middle, inner] are the dimensions of gate and up after merging contiguous ones.
struct GluParams {
  GluStrides gate, up;
  uint64_t inner;
  uint32_t middle;
  uint32_t chunks;  // of kVectorWidth elements, in `inner`
  uint32_t all_chunks;
  GluAccess access;
  ActivationParams activation;
};

// The dtype of a small parameter tensor: absent, the activations' dtype, or float32. Kernels branch on it (uniformly),
// because a template parameter per tensor would multiply the number of kernels to compile.
enum class ParameterType : int32_t { absent, activation, float32 };

// Rows of contiguous tensors. `aligned`: rows start at multiples of kVectorWidth elements, and their length is a
// multiple of it.
struct RowShape {
  uint32_t count;
  uint32_t length;
  uint32_t aligned;
};

// The ops norm, norm_add and residual_norm.
struct ResidualNormParams {
  RowShape row;        // H
  uint32_t input_row;  // between rows of the input, in elements
  uint32_t has_residual;
  ParameterType weight;
  ParameterType scalar;
  uint32_t scalar_stride;  // 0 for a scalar of one element
  float eps;
};

// The five weighted sums. Each uses the fields that its op needs.
struct WeightedSumParams {
  RowShape row;  // H
  uint32_t top_k;
  ParameterType weights;
  ParameterType shared_gate;
  ParameterType norm_weight;
  ParameterType residual_norm_weight;
  uint32_t has_shared;
  uint32_t has_residual;
  float eps;
};

// ------------------------------------------------------------------------------------------ experts

// How a weight matrix is loaded: 16 bytes at a time along rows or along columns (transposed weights), if alignment
// allows; else one element (packed weights: one byte) at a time, along the dimension with the smaller stride.
enum class WeightLayout : int32_t { rows_wide, rows, columns_wide, columns };

// The number type of scales and offsets, and of dense data.
enum class NumberType : int32_t { float32, float16, bfloat16, e8m0, e4m3 };

// How the work is divided, which determines the grids. tuning.h has the numbers that depend on the GPU.
MOE_METAL_CONSTANT uint32_t kRowSimdgroups = 8;   // decode, rows: simdgroups of a threadgroup at most
MOE_METAL_CONSTANT uint32_t kDotRows = 4;         // decode, rows: rows of weights of a lane
MOE_METAL_CONSTANT uint32_t kPackedLanes = 16;    // decode, packed weights: lanes of a row (dense: all 32)
MOE_METAL_CONSTANT uint32_t kPackedColumns = 32;  // packed weights: columns of a wide chunk, all of one group
MOE_METAL_CONSTANT uint32_t kNarrowColumns = 16;  // of a narrow chunk: groups of 16, odd lengths, unaligned rows
MOE_METAL_CONSTANT uint32_t kPackedStep = kPackedLanes * kPackedColumns;
MOE_METAL_CONSTANT uint32_t kColumnSimdgroups = 16;  // decode, columns: simdgroups of a threadgroup at most
MOE_METAL_CONSTANT uint32_t kDownColumnRows = 32;    // decode, columns: rows of down of a threadgroup
MOE_METAL_CONSTANT uint32_t kColumnInner = 32;       // decode, columns: gate rows of a threadgroup
MOE_METAL_CONSTANT uint32_t kColumnRows = 64;     // rows of gate_up of a threadgroup: these gate rows and their up rows
MOE_METAL_CONSTANT uint32_t kTileSimdgroups = 4;  // prefill: of a threadgroup
MOE_METAL_CONSTANT uint32_t kTileThreads = 32 * kTileSimdgroups;

// Prefill: how many fragments of 8 rows of weights a simdgroup has, for tiles of `tile_rows` slots or tokens. The sums
// take two registers per fragment and 8 slots. They are limited to 32 registers, since with over 100 registers per
// thread too few threads fit on a core.
constexpr uint32_t tile_fragments(uint32_t tile_rows) { return tile_rows > 32 ? 2 : 4; }
// Rows of weights of a threadgroup.
constexpr uint32_t tile_weight_rows(uint32_t tile_rows) { return kTileSimdgroups * 8 * tile_fragments(tile_rows); }

// Products on the matrix units: the rows of weights of a threadgroup, and its simdgroups for tiles of `tile_rows` rows
// of x. Projects that have measured an M5 use the same sizes: PyTorch 16 by 64 and 64 by 64, llama.cpp 32 by 64.
MOE_METAL_CONSTANT uint32_t kProductRows = 64;
MOE_METAL_CONSTANT uint32_t kProductColumns = 4 * kNarrowColumns;  // packed weights: columns unpacked at a time
constexpr uint32_t product_simdgroups(uint32_t tile_rows) { return tile_rows > 16 ? 4 : 2; }

// Strides of scales or offsets, in bytes.
struct ScaleParams {
  int64_t expert, row, group;
};

// Element (e, r, c) of a dense weight is at e * expert + r * row + c * column. Strides of packed weights are in bytes,
// and `column` is not used. Formats whose blocks contain their scales use neither `scale` nor `offset`. If gate and up
// are separate, a row r >= gap_at (of up) starts at r * row + gap.
struct WeightParams {
  int64_t expert, row, column, gap;
  ScaleParams scale, offset;
  NumberType scale_type;
  uint32_t group_shift;  // log2 of the columns that share a scale
  WeightLayout layout;
  uint32_t parts;       // decode: simdgroups that divide the columns of a row
  uint32_t has_factor;  // a factor of the whole matrix is in place of the offset
  uint32_t gap_at;
};

// The widest load that divides `bytes` contiguous bytes.
constexpr uint32_t bytes_at_once(uint32_t bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
}

struct ExpertsParams {
  uint32_t T, E, K, H, I;
  uint32_t long_ids;     // ids are int64
  uint32_t wide_x;       // rows of x may be loaded 16 bytes at a time
  uint32_t interleaved;  // gate and up rows alternate
  // The bias of gate row i is element i * bias_stride; that of its up row is `up_bias_offset` elements further.
  uint32_t bias_stride, up_bias_offset;
  // Decode: floats of a row of inner, and whether its elements are in the order of packed_index (dots.h).
  uint32_t inner_length, inner_reordered;
  // Prefill: slots of a tile, length of the list of tiles, and how many tiles go through all rows of weights together.
  // The list is followed by the end of each expert's slots in the order.
  uint32_t tile_rows, tiles, tiles_per_band;
  uint32_t has_shared, has_residual;
  ParameterType weights, gate_up_bias, down_bias, shared_gate;
  ActivationParams activation;
  WeightParams gate_up, down;
};

// The op linear.
struct LinearParams {
  uint32_t T, N, H;
  uint32_t wide_x;          // rows of x may be loaded 16 bytes at a time
  uint32_t tiles_per_band;  // tiles of tokens that go through all rows of the weight together
  ParameterType bias;
  uint32_t heads;                      // each with a matrix of its own; 1: all rows of x have the same
  uint32_t token_stride, head_stride;  // of x, in elements
  uint32_t unused;
  WeightParams weight;
};

// Products on the matrix units (tensor_ops.metal).
struct ProductParams {
  uint32_t rows, N, columns;  // of x, of each expert's weight, and of both
  uint32_t tiles;             // length of the list of tiles; 0: no list, and a single weight
  uint32_t tiles_per_band;    // tiles that go through all rows of weights together
  ParameterType bias;
  WeightParams weight;
};

// The op dequantize, for matrices of `rows` by `columns`. A thread has a chunk of kNarrowColumns.
struct DequantizeParams {
  uint64_t all_chunks;
  uint32_t rows, columns, chunks;  // chunks of a row
  NumberType dense_type;
  WeightParams weight;
};

// The op route, and the second half of gate.
struct RouteParams {
  RoutingParams routing;
  uint32_t tokens;
  ParameterType logits;
  ParameterType select_bias;
  ParameterType per_expert_scale;
};

// ------------------------------------------------------------------------------------------ gate

// How the work is divided; gate.mm chooses a kernel by the shapes.
MOE_METAL_CONSTANT uint32_t kGateMaxExperts = 64;    // gate: the most experts that one threadgroup can have
MOE_METAL_CONSTANT uint32_t kGateSimdgroups = 8;     // gate_logits: of a threadgroup, which divide H
MOE_METAL_CONSTANT uint32_t kGateTileTokens = 32;    // gate_tile: of a threadgroup
MOE_METAL_CONSTANT uint32_t kGateTileExperts = 64;   // gate_tile: of a threadgroup
MOE_METAL_CONSTANT uint32_t kGateTileThreads = 128;  // gate_tile: each has 4 tokens by 4 experts

struct GateParams {
  RouteParams route;
  RowShape row;  // H
  ParameterType norm_weight;
  ParameterType router_bias;
  float eps;
};

// ------------------------------------------------------------------------------------------ rope and attention

// Strides in elements. For angles, a row is a token, and `head` is 0. For a mask, a row is a query and an element a
// key.
struct AttentionStrides {
  uint64_t sequence, head, row, element;
};

MOE_METAL_CONSTANT uint32_t kRopeSimdgroups = 4;  // of a threadgroup, each with a head of a token

// A norm of each head, or one over all heads of a token.
enum class RopeNorm : int32_t { none, each_head, all_heads };

// Queries, keys or values; absent if `count` is 0.
struct RopeHeadsParams {
  AttentionStrides input, output;
  uint32_t count, D, R;
  RopeNorm norm;
  ParameterType norm_weight;
  float scale;
};
struct RopeParams {
  RopeHeadsParams q, k, v, q_first;
  AttentionStrides cos, sin;
  uint32_t items;  // heads of all tokens
  uint32_t T;
  uint32_t interleaved, pairs_stay, norms_last;
  ParameterType cos_type, sin_type;
  float eps;
};

// How the work is divided; attention.metal explains it.
MOE_METAL_CONSTANT uint32_t kAttentionSimdgroups = 4;  // of a threadgroup
MOE_METAL_CONSTANT uint32_t kAttentionThreads = 32 * kAttentionSimdgroups;
MOE_METAL_CONSTANT uint32_t kCombineSimdgroups = 16;  // of a threadgroup of attention_combine, at most
MOE_METAL_CONSTANT uint32_t kCombineThreads = 32 * kCombineSimdgroups;
MOE_METAL_CONSTANT uint32_t kPartsAtOnce = 8;             // parts that one of them loads before it adds the first one
MOE_METAL_CONSTANT uint32_t kAttentionRows = 8;           // queries of heads, of a simdgroup
MOE_METAL_CONSTANT uint32_t kAttentionKeys = 32;          // keys of a simdgroup at a time
MOE_METAL_CONSTANT uint32_t kAttentionKeyColumns = 32;    // of a simdgroup's tile of keys
MOE_METAL_CONSTANT uint32_t kAttentionValueColumns = 64;  // of a simdgroup's tile of values

// The element type of an attention mask.
enum class MaskType : int32_t { absent, boolean, activation, float32 };

struct AttentionParams {
  AttentionStrides q, k, v, mask;
  uint64_t sums_offset;  // of the parts' sums in the memory of the parts, in floats
  uint32_t B, A, J, T, S, D, V;
  uint32_t rows;              // queries of all heads that share a key head: T * A / J
  uint32_t row_threadgroups;  // threadgroups that divide them
  uint32_t row_tiles;         // of kAttentionRows rows, per threadgroup
  uint32_t column_parts;      // simdgroups that divide the columns of a key, and those of a value
  uint32_t first_key;         // the first key that any query sees
  uint32_t parts;             // threadgroups that divide the keys
  uint32_t part_keys;         // keys of one of them
  uint32_t causal;
  uint32_t window;  // 0: none
  MaskType mask_type;
  ParameterType sinks;
  float scale, softcap;
};

// ------------------------------------------------------------------------------------------ linear attention

MOE_METAL_CONSTANT int kMaxStateRows = 256;  // D

// How the work is divided; linear_attention.metal explains it.
MOE_METAL_CONSTANT uint32_t kStateTokens = 8;     // that a threadgroup prepares together, at most
MOE_METAL_CONSTANT uint32_t kStateFloats = 6144;  // of threadgroup memory, for these tokens
MOE_METAL_CONSTANT uint32_t kConvThreads = 256;   // short_conv: of a threadgroup, at most

// How four neighbours of the state are loaded: along V, along D, or one at a time.
enum class StateLayout : int32_t { absent, columns, rows, any };

// Strides in elements. Value head h is head h % (A / J) of key head h / (A / J).
struct HeadStrides {
  uint64_t sequence, row, key_head, head, element;
};
struct RowStrides {
  uint64_t sequence, row, element;
};

// The op linear_attention_. Each threadgroup has `key_rows` >= D rows and `tile_columns` columns of a state.
struct LinearAttentionParams {
  HeadStrides q, k, v, gate, decay, beta;
  RowStrides mask, past, kept, log;
  AttentionStrides state;  // row: of D, element: of V
  uint32_t sequences, T, J, A, D, V;
  uint32_t W, R, L, replay;
  uint32_t key_rows, tile_columns, tiles;
  uint32_t block_tokens, token_floats;  // of threadgroup memory: tokens at a time, floats of each
  uint32_t has_offsets, long_offsets;
  uint32_t decays_channels;
  uint32_t has_gate, has_mask, has_past;
  uint32_t gate_first, tiled;
  uint32_t norm_rows;     // groups of heads that are normed together; A: each head
  uint32_t norms_groups;  // the weight has a row for each
  uint32_t in_groups;     // a second kernel computes gate and norm
  StateLayout layout;
  Rule rule;
  DecayKind decay_kind;
  ChannelOrder order;
  Pointwise activation, gate_activation;
  ParameterType decay_type, beta_type, log_rate, decay_bias, norm_weight, skip, conv_weight, conv_bias;
  float lower_bound, step_min, step_max, beta_scale, scale;
  float qk_eps;  // < 0: no norms of q and k
  float eps;
};

// The op short_conv_.
struct ShortConvParams {
  RowStrides x, input_gate, output_gate, past, kept;
  uint32_t B, T, C, W, R, dilation;
  uint32_t has_input_gate, has_output_gate, has_past;
  ParameterType weight, bias;
  Pointwise activation;
};

// The params structs and their sizes in bytes. Both compilers check them, so shaders and host agree.
// clang-format off
#define MOE_METAL_PARAMS(check) \
  check(RoutingParams, 40) check(RouteParams, 56) check(GateParams, 80) check(ActivationParams, 12) \
  check(GluParams, 88) check(WeightParams, 104) check(ExpertsParams, 304) check(ProductParams, 128) \
  check(LinearParams, 144) check(DequantizeParams, 128) check(WeightedSumParams, 44) \
  check(ResidualNormParams, 36) check(RopeParams, 448) check(AttentionParams, 216) \
  check(LinearAttentionParams, 560) check(ShortConvParams, 168)
#define MOE_METAL_CHECK_SIZE(params, bytes) static_assert(sizeof(params) == bytes, #params ": its size in common.h");
// clang-format on
MOE_METAL_PARAMS(MOE_METAL_CHECK_SIZE)

}  // namespace moe_metal

// The dtypes of activations, for the macro MOE_METAL_DTYPE and for launch.h.
#define MOE_METAL_float 0
#define MOE_METAL_half 1
#define MOE_METAL_bfloat 2

#ifdef __METAL_VERSION__
// instantiate_kernel("op_float", op<float>): one line per variant; the compiler derives the signature.
#define instantiate_kernel(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// A library contains the kernels for one dtype of the activations, MOE_METAL_DTYPE, or for all if that is not defined.
#if !defined(MOE_METAL_DTYPE) || MOE_METAL_DTYPE == MOE_METAL_float
#define if_float(...) __VA_ARGS__
#else
#define if_float(...)
#endif
#if !defined(MOE_METAL_DTYPE) || MOE_METAL_DTYPE == MOE_METAL_half
#define if_half(...) __VA_ARGS__
#else
#define if_half(...)
#endif
#if !defined(MOE_METAL_DTYPE) || MOE_METAL_DTYPE == MOE_METAL_bfloat
#define if_bfloat(...) __VA_ARGS__
#else
#define if_bfloat(...)
#endif
// Larger files are divided into parts by `#if in_part(name)`. A library contains one part, for which MOE_METAL_PART and
// MOE_METAL_PART_name are defined, or all parts if MOE_METAL_PART is not defined.
#ifdef MOE_METAL_PART
#define in_part(name) MOE_METAL_PART_##name
#else
#define in_part(name) 1
#endif
// clang-format off
// Expands instantiate(dtype, ...) for each dtype.
#define for_dtypes(instantiate, ...)          \
  if_float(instantiate(float, __VA_ARGS__))   \
  if_half(instantiate(half, __VA_ARGS__))     \
  if_bfloat(instantiate(bfloat, __VA_ARGS__))
// One kernel per dtype.
#define instantiate_dtype(dtype, name, function) instantiate_kernel(name "_" #dtype, moe_metal::function<dtype>)
#define instantiate_dtypes(name, function) for_dtypes(instantiate_dtype, name, function)
// clang-format on
#endif
