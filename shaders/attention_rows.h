// The work of the kernel attention: the position of a lane in it, and the keys that its rows see.
#pragma once
#include "matrices.h"
#include "rows.h"

namespace moe_metal {

MOE_METAL_CONSTANT uint kKeyFragments = kAttentionKeys / 8;

// The position of a simdgroup and its lane in the work.
struct AttentionPosition {
  uint simdgroup, lane, column_part, row_tile, key_part, key_parts;
  FragmentElement element;
};
inline AttentionPosition attention_position(uint thread_index, constant AttentionParams& params) {
  AttentionPosition position;
  position.simdgroup = thread_index / kSimdgroup;
  position.lane = thread_index % kSimdgroup;
  // These are powers of two; divisions take long.
  const uint column_parts = ctz(params.column_parts), row_tiles = ctz(params.row_tiles);
  position.column_part = position.simdgroup & (params.column_parts - 1);
  position.row_tile = position.simdgroup >> column_parts & (params.row_tiles - 1);
  position.key_part = position.simdgroup >> (column_parts + row_tiles);
  position.key_parts = kAttentionSimdgroups >> (column_parts + row_tiles);
  position.element = fragment_element(position.lane);
  return position;
}

// The number of fragments of a simdgroup in threadgroup memory: twice its scores, or its sums.
constexpr uint max_fragments(uint value_tiles) {
  return 2 * kKeyFragments > 8 * value_tiles ? 2 * kKeyFragments : 8 * value_tiles;
}

// ------------------------------------------------------------------------------------------ what a row sees

struct SeenKeys {
  uint first, end;
};
inline SeenKeys seen_keys(uint query, constant AttentionParams& params) {
  const int past = int(params.S) - int(params.T) + int(query) + 1;
  SeenKeys keys;
  keys.first = params.window ? uint(max(past - int(params.window), 0)) : 0;
  keys.end = params.causal ? uint(max(past, 0)) : params.S;
  return keys;
}

struct Head {
  ulong sequence, key_head;
};
inline Head head_of(uint group, constant AttentionParams& params) {
  const uint head = group / params.row_threadgroups;
  Head found;
  found.sequence = head / params.J;
  found.key_head = head % params.J;
  return found;
}

// One of a lane's two rows.
struct AttentionRow {
  uint query, head;
  bool exists;
  SeenKeys keys;  // empty if the row does not exist
  ulong mask;     // the offset of its mask
};
inline AttentionRow attention_row(uint r, Head head, SeenKeys part, constant AttentionParams& params) {
  const uint heads = params.A / params.J, inside = min(r, params.rows - 1);
  AttentionRow row;
  row.query = inside / heads;
  row.head = uint(head.key_head) * heads + inside % heads;
  row.exists = r < params.rows;
  row.keys = seen_keys(row.query, params);
  row.keys.end = row.exists ? min(row.keys.end, part.end) : 0;
  row.mask = head.sequence * params.mask.sequence + row.head * params.mask.head + row.query * params.mask.row;
  return row;
}

// The keys of a part that any row in [first_row, end_row) sees.
inline SeenKeys part_keys(uint first_row, uint end_row, uint part, constant AttentionParams& params) {
  const uint heads = params.A / params.J, begin = params.first_key + part * params.part_keys;
  const uint last_row = min(end_row, params.rows) - 1;
  SeenKeys keys;
  keys.first = max(seen_keys(first_row / heads, params).first, begin);
  keys.end = min(seen_keys(last_row / heads, params).end, begin + params.part_keys);
  return keys;
}

// The score of a key after softcap and mask. It is and stays -inf if the row does not see the key.
template <typename T>
float masked(float score, uint key, AttentionRow row, device const uchar* mask, constant AttentionParams& params) {
  if (key < row.keys.first || key >= row.keys.end) return score;
  if (params.softcap != 0) score = params.softcap * precise::tanh(score / params.softcap);
  if (params.mask_type == MaskType::absent) return score;
  const ulong at = row.mask + key * params.mask.element;
  if (params.mask_type == MaskType::boolean) return mask[at] ? score : -INFINITY;
  const float added = params.mask_type == MaskType::float32 ? reinterpret_cast<device const float*>(mask)[at]
                                                            : float(reinterpret_cast<device const T*>(mask)[at]);
  return added == -INFINITY ? added : score + added;
}

}  // namespace moe_metal
