// rope and attention with the rows of a cache (room.h) in place of keys and values, and `linear` with a matrix for each
// head. They run the kernels of those ops. `patch` uses them for few tokens. Their names begin with an underscore in
// Python, which has no functions for them, and torch.compile never sees them.
#pragma once
#include <optional>
#include <string>
#include <utility>

#include "ops.h"
#include "room.h"

#define MOE_METAL_CACHE_OPS(op) op(rope_into) op(attention_over) op(linear_of_heads)

namespace moe_metal {

#define MOE_METAL_ROOM "__torch__.torch.classes.moe_metal.Room room"

// Keys and values are written to rows of the cache.
struct RopeInto : Rope {
  c10::intrusive_ptr<Room> room;
  Tensor output;  // of the queries, with what precedes them

  void done() const { room->advance(T); }
  Tensor outputs() const { return output; }
};

// Besides what rope does: angles may be absent, so that nothing is rotated. The norms may be last, and values have a
// scale or, if norms_v, a norm. With latents (MLA), v is the latent and k the part of the keys that is rotated; a row
// of the output is that of q_first and then that of q.
inline constexpr char schema_rope_into[] =
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, " MOE_METAL_ROOM
    ", Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, Tensor? v_norm_weight=None, Tensor? q_first=None, *, "
    "float eps=1e-6, bool interleaved=False, bool pairs_stay=False, bool norms_last=False, bool norms_v=False, "
    "float v_scale=1.0) -> Tensor";
inline void check_values(Arguments& args, const Tensor& v, const OptionalTensor& norm_weight, bool norms, double scale,
                         RopeHeads& heads) {
  heads.input = args.activation("v", v, "BTJV");
  heads.norm_weight = args.parameter("v_norm_weight", norm_weight, "V");
  TORCH_CHECK(norms || !heads.norm_weight.defined(), args.prefix("v_norm_weight"), "expected none without norms_v");
  make_contiguous({&heads.norm_weight});
  std::tie(heads.heads, heads.D) = std::tuple(args['J'], args['V']);
  heads.norm = norms ? RopeNorm::each_head : RopeNorm::none;
  heads.scale = args.finite("v_scale", scale);
}
inline RopeInto check_rope_into(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cos,
                                const OptionalTensor& sin, const c10::intrusive_ptr<Room>& room,
                                const OptionalTensor& q_norm_weight, const OptionalTensor& k_norm_weight,
                                const OptionalTensor& v_norm_weight, const OptionalTensor& q_first, double eps,
                                bool interleaved, bool pairs_stay, bool norms_last, bool norms_v, double v_scale) {
  Arguments args("_rope_into", "q", q);
  RopeInto call;
  check_rotated(args, q, k, cos, sin, q_norm_weight, k_norm_weight, eps, interleaved, call);
  check_values(args, v, v_norm_weight, norms_v, v_scale, call.v);
  call.q_first.input = args.activation("q_first", q_first, "BTAW");
  const bool latents = call.q_first.input.defined(), all = q.dim() == 4 && call.q.norm == RopeNorm::all_heads;
  TORCH_CHECK(latents == room->side_by_side(), args.prefix("q_first"), "expected ", latents ? "none" : "a tensor",
              " with this room");
  TORCH_CHECK(!pairs_stay || interleaved, args.prefix("pairs_stay"), "expected False where interleaved is False");
  TORCH_CHECK(!norms_last || !(interleaved || all || call.k.norm == RopeNorm::all_heads), args.prefix("norms_last"),
              "expected False with interleaved pairs or a norm over all heads");
  TORCH_CHECK(latents ? room->takes(v, k) : room->takes(k, v), args.prefix("room"),
              "expected rows of keys and values like these, got others");
  call.pairs_stay = pairs_stay, call.norms_last = norms_last, call.room = room;
  if (latents) call.q_first.heads = call.q.heads, call.q_first.D = args['W'];
  const int64_t before = call.q_first.D, width = before + call.q.D;
  call.output = args.output({call.B, call.q.heads, call.T, width});
  const auto columns = [&](int64_t first, int64_t count) {
    const c10::SmallVector<int64_t, 5> sizes = {call.B, call.q.heads, call.T, count};
    return view_of(call.output, sizes, call.output.strides(), call.output.storage_offset() + first);
  };
  call.q.output = columns(before, call.q.D);
  if (latents) call.q_first.output = columns(0, before);
  const auto rows = room->reserve(call.T, k);
  call.k.output = latents ? rows.second : rows.first, call.v.output = latents ? rows.first : rows.second;
  return call;
}

// The queries are those of the last tokens in the room.
inline constexpr char schema_attention_over[] =
    "(Tensor q, " MOE_METAL_ROOM
    ", Tensor? mask=None, Tensor? sinks=None, *, float? scale=None, bool causal=False, float softcap=0.0) -> Tensor";
inline Attention check_attention_over(const Tensor& q, const c10::intrusive_ptr<Room>& room, const OptionalTensor& mask,
                                      const OptionalTensor& sinks, std::optional<double> scale, bool causal,
                                      double softcap) {
  const auto [k, v] = room->seen();
  return check_attention(q, k, v, mask, sinks, scale, causal, 0, softcap);
}

// x [T, A, H], weight [A, N, H] in any format -> [T, A, N]: each head has a matrix of its own, which it multiplies.
// These are MLA's products of queries and of weighted sums, of few tokens.
inline constexpr char schema_linear_of_heads[] =
    "(Tensor x, Tensor weight, Tensor? scale=None, Tensor? offset=None, *, str format='dense', int group_size=0) -> "
    "Tensor";
inline Linear check_linear_of_heads(const Tensor& x, const Tensor& weight, const OptionalTensor& scale,
                                    const OptionalTensor& offset, std::string_view format, int64_t group_size) {
  Arguments args("_linear_of_heads", "x", x);
  Linear call;
  call.x = args.activation("x", x, "TAH");
  args.at_least_one('A', "x");
  args.at_least_one('H', "x");
  call.weight = args.weight({"weight", "scale", "offset", "ANH"}, weight, scale, offset, args.format("format", format),
                            group_size);
  args.at_least_one('N', "weight");
  std::tie(call.T, call.heads, call.N, call.H) = std::tuple(args['T'], args['A'], args['N'], args['H']);
  if (call.heads == 1 || call.x.stride(2) != 1) make_contiguous({&call.x});
  call.output = args.output({call.T, call.heads, call.N});
  return call;
}

namespace cpu {
inline void run_rope_into(const RopeInto& call) { run_rope(call); }
inline void run_attention_over(const Attention& call) { run_attention(call); }
inline void run_linear_of_heads(const Linear& call) { run_linear(call); }
}  // namespace cpu
namespace mps {
inline void run_rope_into(const RopeInto& call) { run_rope(call); }
inline void run_attention_over(const Attention& call) { run_attention(call); }
inline void run_linear_of_heads(const Linear& call) { run_linear(call); }
}  // namespace mps

}  // namespace moe_metal
