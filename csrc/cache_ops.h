// rope and attention with the rows of a cache (room.h) in place of keys and values. They run the kernels of those ops.
// `patch` uses them for single tokens. Their names begin with an underscore in Python, which has no functions for them,
// and torch.compile never sees them.
#pragma once
#include <optional>
#include <string>
#include <utility>

#include "ops.h"
#include "room.h"

#define MOE_METAL_CACHE_OPS(op) op(rope_into) op(attention_over)

namespace moe_metal {

#define MOE_METAL_ROOM "__torch__.torch.classes.moe_metal.Room room"

// Keys and values are written to rows of the cache.
struct RopeInto : Rope {
  c10::intrusive_ptr<Room> room;

  void done() const { room->advance(T); }
  Tensor outputs() const { return q.output; }
};

inline constexpr char schema_rope_into[] =
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, " MOE_METAL_ROOM
    ", Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, float eps=1e-6, bool interleaved=False) -> Tensor";
inline RopeInto check_rope_into(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                                const c10::intrusive_ptr<Room>& room, const OptionalTensor& q_norm_weight,
                                const OptionalTensor& k_norm_weight, double eps, bool interleaved) {
  Arguments args("_rope_into", "q", q);
  RopeInto call;
  check_rotated(args, q, k, cos, sin, q_norm_weight, k_norm_weight, eps, interleaved, call);
  call.v = args.activation("v", v, "BTJV");
  TORCH_CHECK(room->takes(k, v), args.prefix("room"), "expected rows of keys and values like these, got others");
  call.room = room;
  std::tie(call.k.output, call.v_output) = room->reserve(call.T, k);
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

namespace cpu {
inline void run_rope_into(const RopeInto& call) { run_rope(call); }
inline void run_attention_over(const Attention& call) { run_attention(call); }
}  // namespace cpu
namespace mps {
inline void run_rope_into(const RopeInto& call) { run_rope(call); }
inline void run_attention_over(const Attention& call) { run_attention(call); }
}  // namespace mps

}  // namespace moe_metal
