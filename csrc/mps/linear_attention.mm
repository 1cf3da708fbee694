// The op linear_attention_: which kernel, and how the heads are divided into threadgroups.
#include "mps/recurrent.h"
#include "mps/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// With more threads, each would have fewer registers.
constexpr int kMostThreads = 512;
constexpr int64_t kMostColumns = 128;

// A kernel for keys of up to 64, 128 or 256 elements. A lane has 8 rows by 4 columns of a state, so the more key parts
// divide the rows, the fewer columns a simdgroup has.
struct StateKernel {
  StateKernel(const char* function, const char* part, int64_t key_parts)
      : kernels("linear_attention", function, kMostThreads, part),
        rows(kVectorWidth * key_parts),
        columns(kSimdgroup / key_parts * kVectorWidth),
        most_columns(std::min<int64_t>(kMostThreads / kSimdgroup * columns, kMostColumns)) {}

  Kernels kernels;
  const int64_t rows;          // that the lanes of a simdgroup have at a time; each lane has one or two of these
  const int64_t columns;       // of a simdgroup
  const int64_t most_columns;  // of a threadgroup
};

StateKernel keys64("linear_attention_64", "keys64", 8);
StateKernel keys128("linear_attention_128", "keys128", 16);
StateKernel keys256("linear_attention_256", "keys256", 32);
Kernels groups("linear_attention", "linear_attention_groups", 1024, "groups");

// The kernel for the longest keys takes any number of rows; the others need whole ones.
StateKernel& kernel_of(const LinearAttention& call) {
  for (StateKernel* kernel : {&keys64, &keys128}) {
    if (call.D <= 2 * kernel->rows && call.D % kernel->rows == 0) return *kernel;
  }
  return keys256;
}

uint64_t stride(const Tensor& tensor, int dim) { return static_cast<uint64_t>(tensor.stride(dim)); }

HeadStrides key_strides(const Tensor& tensor) {
  return {stride(tensor, 0), stride(tensor, 1), stride(tensor, 2), 0, stride(tensor, 3)};
}
HeadStrides value_strides(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto of = [&](int d) { return stride(tensor, d); };
  return {of(0), of(1), of(2), of(3), tensor.dim() == 5 ? of(4) : 0};
}
AttentionStrides state_strides(const Tensor& state) {
  if (!state.defined()) return {};
  return {stride(state, 0), stride(state, 1), stride(state, 2), stride(state, 3)};
}

// Whether dimension `inner` of the state can be loaded four elements at a time.
bool loads_vectors(const Tensor& state, int inner) {
  bool loads = state.stride(inner) == 1 && state.size(inner) % kVectorWidth == 0;
  loads &= state.storage_offset() % kVectorWidth == 0;
  for (int d = 0; d < 4; ++d) loads &= d == inner || state.size(d) == 1 || state.stride(d) % kVectorWidth == 0;
  return loads;
}

// `whole`: the threadgroups have no rows or columns beyond the last.
StateLayout layout_of(const Tensor& state, bool whole) {
  if (!state.defined()) return StateLayout::absent;
  if (!whole) return StateLayout::any;
  return loads_vectors(state, 3)   ? StateLayout::columns
         : loads_vectors(state, 2) ? StateLayout::rows
                                   : StateLayout::any;
}

void set_options(LinearAttentionParams& params, const LinearAttention& call) {
  const LinearAttentionOptions& options = call.options;
  params.gate_first = options.gate_first;
  params.tiled = options.tiled;
  params.rule = options.rule;
  params.decay_kind = options.decay_kind;
  params.order = options.order;
  params.activation = options.activation;
  params.gate_activation = options.gate_activation;
  params.lower_bound = options.lower_bound;
  params.step_min = options.step_min;
  params.step_max = options.step_max;
  params.beta_scale = options.beta_scale;
  params.scale = options.scale;
  params.qk_eps = options.qk_eps;
  params.eps = options.eps;
}

void set_tensors(LinearAttentionParams& params, const LinearAttention& call) {
  params.q = key_strides(call.q);
  params.k = key_strides(call.k);
  params.v = value_strides(call.v);
  params.gate = value_strides(call.gate);
  params.decay = value_strides(call.decay);
  params.beta = value_strides(call.beta);
  params.mask = row_strides(call.mask);
  params.past = row_strides(call.past);
  params.kept = row_strides(call.kept);
  params.log = row_strides(call.log);
  params.state = state_strides(call.state);
  params.has_offsets = call.offsets.defined();
  params.long_offsets = call.offsets.defined() && call.offsets.scalar_type() == at::kLong;
  params.decays_channels = call.decays_channels();
  params.has_gate = call.gate.defined();
  params.has_mask = call.mask.defined();
  params.has_past = call.past.defined() && call.W > 1;
  params.decay_type = parameter_type(call.decay);
  params.beta_type = parameter_type(call.beta);
  params.log_rate = parameter_type(call.log_rate);
  params.decay_bias = parameter_type(call.decay_bias);
  params.norm_weight = parameter_type(call.norm_weight);
  params.skip = parameter_type(call.skip);
  params.conv_weight = parameter_type(call.conv_weight);
  params.conv_bias = parameter_type(call.conv_bias);
}

// Sizes, and how the work is divided. -> the grid
Grid divide(LinearAttentionParams& params, const LinearAttention& call, const StateKernel& kernel) {
  to_uint(call.replay + call.T + call.W);
  to_uint(call.S * call.A);
  params.sequences = to_uint(call.S);
  params.T = to_uint(call.T);
  params.J = to_uint(call.J);
  params.A = to_uint(call.A);
  params.D = to_uint(call.D);
  params.V = to_uint(call.V);
  params.W = to_uint(call.W);
  params.R = to_uint(call.R);
  params.L = to_uint(call.L);
  params.replay = to_uint(call.replay);
  const int64_t tiles = ceil_div(call.V, kernel.most_columns);
  const int64_t simdgroups = ceil_div(ceil_div(call.V, tiles), kernel.columns);
  const int64_t key_rows = ceil_div(call.D, kernel.rows) * kernel.rows, columns = simdgroups * kernel.columns;
  params.tiles = to_uint(ceil_div(call.V, columns));
  params.norms_groups = call.norms_groups();
  params.norm_rows = call.norms_groups() ? to_uint(call.norm_weight.size(0)) : params.A;
  params.in_groups = call.norm_weight.defined() && (params.norm_rows != params.A || params.tiles > 1);
  params.layout = layout_of(call.state, call.D == key_rows && call.V % columns == 0);
  const bool gates_here = params.has_gate && !params.in_groups;
  const int64_t floats = 2 * key_rows + (gates_here ? 3 : 2) * columns + (call.decays_channels() ? key_rows : 0);
  params.key_rows = to_uint(key_rows);
  params.tile_columns = to_uint(columns);
  params.token_floats = to_uint(floats);
  params.block_tokens = to_uint(std::min<int64_t>(kStateTokens, kStateFloats / floats));
  return {call.S * call.A, params.tiles, static_cast<int>(simdgroups * kSimdgroup)};
}

}  // namespace

void mps::run_linear_attention_(const LinearAttention& call) {
  LinearAttentionParams params = {};
  StateKernel& kernel = kernel_of(call);
  set_options(params, call);
  set_tensors(params, call);
  const Grid grid = divide(params, call, kernel);
  const at::ScalarType dtype = call.q.scalar_type();
  // Without tokens only the state, the log and what is kept have memory.
  const Tensor q = or_spare(call.q, 0), k = read(call.k), v = read(call.v), gate = read(call.gate);
  const Tensor decay = read(call.decay), beta = read(call.beta), mask = read(call.mask), past = read(call.past);
  const Tensor state = or_spare(call.state, 1), kept = or_spare(call.kept, 2);
  const Tensor log = or_spare(call.log, 3), offsets = or_spare(call.offsets, 5);
  const int64_t rows = call.B * call.T * params.norm_rows;
  const bool in_groups = params.in_groups && call.T > 0;
  const Tensor results = in_groups ? at::empty({call.B, call.T, call.A, call.V}, call.q.options().dtype(at::kFloat))
                                   : or_spare(call.output, 4);
  const Grid norms = {in_groups ? to_uint(rows) : 0, 1, threads_for_row(rows, call.A / params.norm_rows * call.V)};
  launch({{kernel.kernels[dtype],
           grid,
           q,
           k,
           v,
           gate,
           decay,
           beta,
           call.log_rate,
           call.decay_bias,
           call.norm_weight,
           call.skip,
           call.conv_weight,
           call.conv_bias,
           past,
           mask,
           offsets,
           state,
           kept,
           log,
           results,
           params},
          {groups[dtype], norms, results, gate, call.norm_weight, offsets, call.output, params}});
}

}  // namespace moe_metal
